// glibc 2.32 and later define this variable. If the compiler's glibc has it, libstdc++'s inline
// reference counts read it, and the library would not load on an older glibc, such as the 2.28 that
// torch's own wheels require. This definition, visible to this library alone, replaces glibc's;
// false keeps the counts atomic. This file includes no header that declares the variable.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
