// glibc 2.32 and later define this variable. libstdc++'s inline reference counts read it where the
// compiler's glibc has it, and then the library would not load on an older one, such as the 2.28
// that torch's own wheels ask for. A definition of our own, seen by this library alone, stands in
// its place: false, so that counts are always atomic. Nothing is included that declares it.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
