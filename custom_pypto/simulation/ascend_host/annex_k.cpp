// The string functions of C11's annex K, which CANN has and glibc lacks.

#include <cstdarg>
#include <cstdio>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

API int strcpy_s(char* to, size_t size, const char* from) {
  std::snprintf(to, size, "%s", from);
  return std::strlen(from) >= size;
}
API int vsnprintf_s(char* to, size_t size, size_t count, const char* format, va_list arguments) {
  const int length = std::vsnprintf(to, size, format, arguments);
  return length < 0 || static_cast<size_t>(length) >= size || static_cast<size_t>(length) > count
             ? -1
             : length;
}
API int snprintf_s(char* to, size_t size, size_t count, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf_s(to, size, count, format, arguments);
  va_end(arguments);
  return length;
}
