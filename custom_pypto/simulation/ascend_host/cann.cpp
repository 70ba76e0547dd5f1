// Host emulator of the CANN functions that torch_npu and torchair call to convert a graph. It has
// one device, whose memory is the process's own, and streams that execute synchronously. Written
// from CANN's public function names and from how their callers use the results.
//
// Two parts do more than return a value:
//  * GetRegisteredIrDef gives torchair the prototypes of our operators, which Python declares;
//  * stream capture does not execute work but passes it to Python (device.py), which executes it at
//    every replay. A call that waits for the device during a capture fails and breaks the capture,
//    as on a device.
//
// All other functions are generated (libraries.py): some do nothing, the others report their name
// and fail.

// the ABI of torch_npu's GE bindings, which get a std::string from GEGetErrorMsg
#define _GLIBCXX_USE_CXX11_ABI 0
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define MEMBER __attribute__((used))  // emits a symbol, though nothing here calls it

using aclError = int;
using Stream = void*;
using HostFunction = void (*)(void*);

namespace {

constexpr aclError kSuccess = 0;
constexpr aclError kOutOfMemory = 207001;
constexpr aclError kInternalError = 500000;   // torch_npu may treat other codes as a warning
constexpr size_t kMemory = size_t{16} << 30;  // reported by the device

thread_local int device = 0;
int the_context = 0;  // its address is the only context
std::string last_error;
std::map<int, int64_t> system_parameters;

// Callbacks that device.py sets: replay or drop the work of a model, record a copy, a fill or a
// call of a host function.
struct {
  int (*replay)(int64_t model);
  void (*forget)(int64_t model);
  void (*copy)(int64_t model, void* to, const void* from, size_t bytes);
  void (*fill)(int64_t model, void* to, int value, size_t bytes);
  void (*call)(int64_t model, HostFunction function, void* arguments);
} python;

// How the work of a captured stream ends: with a recorded event, or none; and whether another
// captured stream waits for that event.
struct Tail {
  void* event = nullptr;
  bool joined = false;
};

// The current capture: its model, or 0; its first stream; its streams, which are the first one and
// every stream that waited for an event of a captured stream; these events; the call that broke the
// capture, if any.
struct {
  int64_t model = 0;
  Stream first = nullptr;
  std::map<Stream, Tail> streams;
  std::set<void*> events;
  std::string broken_by;
} capture;
int64_t models = 0;

// Per GE operator, its parts: "input", "output" or "attribute"; the name; the kind as GE spells it.
std::map<std::string, std::vector<std::array<std::string, 3>>> prototypes;

// The model that captures this stream's work, or 0.
int64_t model_of(Stream stream) { return capture.streams.count(stream) ? capture.model : 0; }

// The model that captures this work on the stream, or 0.
int64_t submit(Stream stream) {
  if (model_of(stream)) capture.streams[stream] = {};
  return model_of(stream);
}

void* model_handle(int64_t model) { return reinterpret_cast<void*>(model); }

aclError fail(const std::string& what) {
  last_error = "custom_pypto's host simulator of CANN: " + what;
  return kInternalError;
}

aclError allocate(void** memory, size_t bytes) {
  return posix_memalign(memory, 512, bytes ? bytes : 512) ? kOutOfMemory : kSuccess;
}

// Returns a value through an output pointer.
template <typename T, typename U>
aclError give(T* place, const U& value) {
  *place = value;
  return kSuccess;
}

// Streams and events are identified by address and have no content.
aclError make(void** handle) { return give(handle, std::malloc(1)); }

aclError break_capture(const std::string& what) {
  if (capture.model && capture.broken_by.empty()) capture.broken_by = what;
  return fail(what);
}

aclError wait(const char* function) {
  if (!capture.model) return kSuccess;
  return break_capture(
      std::string(function) +
      ": the host must not wait for the device while a graph is captured; keep .item(), .cpu() and "
      "printing out of the captured function");
}

}  // namespace

// ---- for device.py

API void ascend_host_connect(int (*replay)(int64_t), void (*forget)(int64_t),
                             void (*copy)(int64_t, void*, const void*, size_t),
                             void (*fill)(int64_t, void*, int, size_t),
                             void (*call)(int64_t, HostFunction, void*)) {
  python = {replay, forget, copy, fill, call};
}
API void ascend_host_declare(const char* type, const char* part, const char* name,
                             const char* kind) {
  prototypes[type].push_back({part, name, kind});
}
API int ascend_host_is_capturing() { return capture.model != 0; }
API int64_t ascend_host_model_of(Stream stream) { return model_of(stream); }
API int64_t ascend_host_submit(Stream stream) { return submit(stream); }
API void ascend_host_break_capture(const char* what) { break_capture(what); }
API aclError ascend_host_failed(const char* what) { return fail(what); }
// Called by the generated C functions that fail.
API aclError ascend_host_missing(const char* function) {
  fail(std::string(function) + " is not part of it; this needs an NPU");
  // not every caller checks the error code
  static std::set<std::string> reported;
  if (reported.insert(function).second) std::fprintf(stderr, "%s\n", last_error.c_str());
  return kInternalError;
}
// Aborts, because no caller checks the result of a C++ function, which may have to be an object.
API void ascend_host_missing_cpp(const char* function) {
  ascend_host_missing(function);
  std::abort();
}

// ---- device

API const char* aclGetRecentErrMsg() { return last_error.c_str(); }
// an Atlas A3; torchair looks up which converters a chip has
API const char* aclrtGetSocName() { return "Ascend910_9391"; }
API aclError aclrtGetDeviceCount(uint32_t* count) { return give(count, 1); }
API aclError aclrtGetDevice(int32_t* id) { return give(id, device); }
API aclError aclrtSetDevice(int32_t id) {
  device = id;
  return kSuccess;
}
API aclError aclrtGetDeviceSatMode(int* mode) { return give(mode, 1); }
API aclError aclrtGetCurrentContext(void** context) { return give(context, &the_context); }
API aclError aclrtCreateContext(void** context, int32_t) { return aclrtGetCurrentContext(context); }
API aclError aclrtGetSysParamOpt(int key, int64_t* value) {
  return give(value, system_parameters[key]);
}
API aclError aclrtSetSysParamOpt(int key, int64_t value) {
  system_parameters[key] = value;
  return kSuccess;
}
API aclError aclrtCtxGetSysParamOpt(int key, int64_t* value) {
  return aclrtGetSysParamOpt(key, value);
}
API aclError aclrtCtxSetSysParamOpt(int key, int64_t value) {
  return aclrtSetSysParamOpt(key, value);
}
API size_t aclGetCompileoptSize(int) { return sizeof "disable"; }
API aclError aclGetCompileopt(int, char* value, size_t size) {
  std::snprintf(value, size, "disable");
  return kSuccess;
}

// ---- memory

API aclError aclrtMalloc(void** memory, size_t bytes, int) { return allocate(memory, bytes); }
API aclError aclrtMallocAlign32(void** memory, size_t bytes, int) {
  return allocate(memory, bytes);
}
API aclError aclrtFree(void* memory) {
  std::free(memory);
  return kSuccess;
}
API aclError aclrtMallocHost(void** memory, size_t bytes) { return allocate(memory, bytes); }
API aclError aclrtFreeHost(void* memory) { return aclrtFree(memory); }
API aclError aclrtGetMemInfo(int, size_t* free, size_t* total) {
  *free = *total = kMemory;
  return kSuccess;
}
API aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, int) {
  if (const aclError error = wait("aclrtMemcpy")) return error;
  std::memmove(to, from, bytes);
  return kSuccess;
}
API aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, int,
                              Stream stream) {
  if (const int64_t model = submit(stream)) {
    python.copy(model, to, from, bytes);
  } else {
    std::memmove(to, from, bytes);
  }
  return kSuccess;
}
API aclError aclrtMemset(void* to, size_t, int32_t value, size_t bytes) {
  if (const aclError error = wait("aclrtMemset")) return error;
  std::memset(to, value, bytes);
  return kSuccess;
}
API aclError aclrtMemsetAsync(void* to, size_t, int32_t value, size_t bytes, Stream stream) {
  if (const int64_t model = submit(stream)) {
    python.fill(model, to, value, bytes);
  } else {
    std::memset(to, value, bytes);
  }
  return kSuccess;
}

// ---- streams and events: work executes when it is submitted, so no call has to wait

API aclError aclrtCreateStream(Stream* stream) { return make(stream); }
API aclError aclrtCreateStreamWithConfig(Stream* stream, uint32_t, uint32_t) {
  return make(stream);
}
API aclError aclrtResetStreamResLimit(Stream);  // core_limits.cpp
API aclError aclrtDestroyStream(Stream stream) {
  aclrtResetStreamResLimit(stream);
  return aclrtFree(stream);
}
API aclError aclrtDestroyStreamForce(Stream stream) { return aclrtDestroyStream(stream); }
API aclError aclrtSynchronizeStream(Stream) { return wait("aclrtSynchronizeStream"); }
API aclError aclrtSynchronizeStreamWithTimeout(Stream, int32_t) {
  return wait("aclrtSynchronizeStream");
}
API aclError aclrtSynchronizeDevice() { return wait("aclrtSynchronizeDevice"); }
API aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return wait("aclrtSynchronizeDevice"); }
API aclError aclrtSynchronizeEvent(void*) { return wait("aclrtSynchronizeEvent"); }
API aclError aclrtCreateEvent(void** event) { return make(event); }
API aclError aclrtCreateEventWithFlag(void** event, uint32_t) { return make(event); }
API aclError aclrtCreateEventExWithFlag(void** event, uint32_t) { return make(event); }
API aclError aclrtDestroyEvent(void* event) {
  capture.events.erase(event);
  for (auto& [stream, tail] : capture.streams) {
    if (tail.event == event) tail.event = nullptr;
  }
  return aclrtFree(event);
}
API aclError aclrtRecordEvent(void* event, Stream stream) {
  capture.events.erase(event);
  if (model_of(stream)) {
    capture.events.insert(event);
    capture.streams[stream] = {event, false};
  }
  return kSuccess;
}
API aclError aclrtStreamWaitEvent(Stream stream, void* event) {
  if (!capture.events.count(event)) return kSuccess;
  capture.streams[stream] = {};
  for (auto& [other, tail] : capture.streams) tail.joined |= tail.event == event;
  return kSuccess;
}
API aclError aclrtLaunchHostFunc(Stream stream, HostFunction function, void* arguments) {
  if (const int64_t model = submit(stream)) {
    python.call(model, function, arguments);
  } else {
    function(arguments);
  }
  return kSuccess;
}
API aclError aclrtQueryEventStatus(void*, int* done) { return give(done, 1); }
API aclError aclrtQueryEventWaitStatus(void*, int* done) { return give(done, 1); }

// ---- capture and replay: a model is a number, under which Python stores the recorded work

API aclError aclmdlRICaptureBegin(Stream stream, int) {
  if (capture.model) return fail("aclmdlRICaptureBegin: another stream is being captured");
  capture.model = ++models;
  capture.first = stream;
  capture.streams = {{stream, {}}};
  return kSuccess;
}
API aclError aclmdlRICaptureGetInfo(Stream stream, int* status, void** model) {
  *model = model_handle(model_of(stream));
  *status = *model != nullptr;
  return kSuccess;
}
API aclError aclmdlRICaptureEnd(Stream, void** model) {
  for (const auto& [stream, tail] : capture.streams) {
    if (stream != capture.first && !tail.joined) {
      break_capture(
          "a stream that was not joined (ACL_ERROR_RT_STREAM_UNJOINED): record an event "
          "after its work and let the first stream wait for it");
    }
  }
  const auto ended = std::exchange(capture, {});
  *model = nullptr;
  if (!ended.broken_by.empty()) {
    python.forget(ended.model);
    return fail("aclmdlRICaptureEnd: the capture was broken by " + ended.broken_by);
  }
  *model = model_handle(ended.model);
  return kSuccess;
}
API aclError aclmdlRIExecuteAsync(void* model, Stream) {
  if (capture.model) {
    return break_capture(
        "aclmdlRIExecuteAsync: a captured graph must not be replayed while another is captured; "
        "keep the replay out of the captured function");
  }
  return python.replay(reinterpret_cast<int64_t>(model)) ? kInternalError : kSuccess;
}
API aclError aclmdlRIDestroy(void* model) {
  python.forget(reinterpret_cast<int64_t>(model));
  return kSuccess;
}

// ---- GE: sessions and operator prototypes

namespace ge {

class AscendString {
 public:
  MEMBER AscendString(const char* text) : text_(new std::string(text ? text : "")) {}
  MEMBER const char* GetString() const { return text_ ? text_->c_str() : ""; }
  MEMBER bool operator<(const AscendString& other) const {
    return std::strcmp(GetString(), other.GetString()) < 0;
  }
  MEMBER bool operator==(const AscendString& other) const {
    return std::strcmp(GetString(), other.GetString()) == 0;
  }

 private:
  std::shared_ptr<std::string> text_;
};

using Options = std::map<AscendString, AscendString>;

uint32_t GEInitialize(const Options&) { return kSuccess; }
uint32_t GEFinalize() { return kSuccess; }
std::string GEGetErrorMsg() { return last_error; }
AscendString GEGetErrorMsgV2() { return {last_error.c_str()}; }
AscendString GEGetWarningMsgV2() { return {""}; }

struct Session {
  MEMBER Session(const Options&) {}
  MEMBER ~Session() {}
};

// A graph is the serialized ModelDef that it was loaded from, which is also what an .air file
// holds.
struct Graph {
  MEMBER Graph(const char*) {}
  MEMBER uint32_t LoadFromSerializedModelArray(const void* model, size_t size) {
    if (model == nullptr || size == 0) return kInternalError;
    model_.reset(new std::string(static_cast<const char*>(model), size));
    return kSuccess;
  }
  MEMBER uint32_t CopyFrom(const Graph& other) {
    model_ = other.model_;
    return kSuccess;
  }
  MEMBER uint32_t SaveToFile(const char* path) const {
    std::ofstream file(path, std::ios::binary);
    return model_ && file << *model_ << std::flush ? kSuccess : kInternalError;
  }
  std::shared_ptr<std::string> model_;  // CANN's has one pointer of this kind, too
};

struct OperatorFactory {
  // torchair checks for operators of a newer CANN before it uses them: the newest CANN has them all
  MEMBER static bool IsExistOp(const char*) { return true; }
};

}  // namespace ge

using Definitions = std::vector<std::pair<ge::AscendString, ge::AscendString>>;

API uint32_t GetRegisteredIrDef(const char* type, Definitions& inputs, Definitions& outputs,
                                Definitions& attributes) {
  for (const auto& [part, name, kind] : prototypes[type]) {
    auto& definitions = part == "input" ? inputs : part == "output" ? outputs : attributes;
    definitions.emplace_back(name.c_str(), kind.c_str());
  }
  return prototypes[type].empty();
}
