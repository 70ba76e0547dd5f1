// Limits of the cores that a stream's work may take. No work here is faster or slower for them.

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#define API extern "C" __attribute__((visibility("default")))

using aclError = int;
using Stream = void*;

API aclError ascend_host_failed(const char* what);  // cann.cpp

namespace {

constexpr aclError kSuccess = 0;

// Cores of an Atlas A3's die, by CANN's number of their type: cube, vector.
constexpr uint32_t kCores[] = {24, 48};
std::map<std::pair<Stream, int>, uint32_t> core_limits;  // of streams with a limit
thread_local Stream limiting_stream = nullptr;           // whose limits this thread uses

}  // namespace

API aclError aclrtGetStreamResLimit(Stream stream, int type, uint32_t* cores) {
  if (type != 0 && type != 1)
    return ascend_host_failed("aclrtGetStreamResLimit: no such type of core");
  const auto found = core_limits.find({stream, type});
  *cores = found == core_limits.end() ? kCores[type] : found->second;
  return kSuccess;
}
API aclError aclrtSetStreamResLimit(Stream stream, int type, uint32_t cores) {
  if ((type != 0 && type != 1) || cores == 0 || cores > kCores[type]) {
    const std::string limits =
        "aclrtSetStreamResLimit: must be 1 to 24 cube cores or 1 to 48 vector cores, got ";
    return ascend_host_failed((limits + std::to_string(cores)).c_str());
  }
  core_limits[{stream, type}] = cores;
  return kSuccess;
}
API aclError aclrtResetStreamResLimit(Stream stream) {
  for (const int type : {0, 1}) core_limits.erase({stream, type});
  return kSuccess;
}
API aclError aclrtUseStreamResInCurrentThread(Stream stream) {
  limiting_stream = stream;
  return kSuccess;
}
API aclError aclrtUnuseStreamResInCurrentThread(Stream) {
  limiting_stream = nullptr;
  return kSuccess;
}
API aclError aclrtGetResInCurrentThread(int type, uint32_t* cores) {
  return aclrtGetStreamResLimit(limiting_stream, type, cores);
}
