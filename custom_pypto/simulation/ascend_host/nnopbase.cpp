// Host emulator of CANN's libnnopbase: descriptions of tensors, and executors of single-operator
// calls. Written from the public documentation of aclCreateTensor, aclDestroyTensor,
// aclCreateIntArray, aclDestroyIntArray, aclSetAclOpExecutorRepeatable and aclDestroyAclOpExecutor.
// It fails where CANN would read freed memory or leak: a tensor or list destroyed before the
// launch, an executor that is launched twice.
#include "nnopbase.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

API void ascend_host_failed(const char* what);

namespace {

constexpr int kSuccess = 0;
constexpr int kNullPointer = 161001;  // CANN's ACLNN_ERR_PARAM_NULLPTR
constexpr int kInvalid = 161002;      // ACLNN_ERR_PARAM_INVALID
constexpr int kFailedAtRun = 361001;  // ACLNN_ERR_RUNTIME_ERROR
constexpr int kFormatND = 2;

// Callbacks that kernel_package.py sets: plan a call, launch or drop a plan.
struct {
  int64_t (*plan)(const char* prototype, const Argument* arguments, uint64_t count,
                  uint64_t* workspace_size);
  int (*launch)(int64_t plan, const char* function, void* workspace, void* stream);
  void (*drop)(int64_t plan);
} python;

}  // namespace

struct aclOpExecutor {
  int64_t plan;
  uint64_t workspace_size;
  std::vector<const aclTensor*> tensors;
  std::vector<const aclIntArray*> lists;
  bool repeatable;
};

namespace {

std::mutex mutex;
std::set<const aclTensor*> tensors;  // those that exist
std::set<const aclIntArray*> lists;
std::set<aclOpExecutor*> executors;

int fail(int code, const std::string& what) {
  ascend_host_failed(what.c_str());
  return code;
}

bool exists(const aclTensor* tensor) {
  const std::lock_guard<std::mutex> lock(mutex);
  return tensors.count(tensor);
}

bool list_exists(const aclIntArray* list) {
  const std::lock_guard<std::mutex> lock(mutex);
  return lists.count(list);
}

bool take(aclOpExecutor* executor) {
  const std::lock_guard<std::mutex> lock(mutex);
  return executors.erase(executor);
}

// The storage index of the view's last element; -1 without elements.
int64_t last_element(const aclTensor& tensor) {
  int64_t last = tensor.offset;
  for (uint64_t i = 0; i < tensor.dimensions; ++i) {
    if (tensor.sizes[i] == 0) return -1;
    last += (tensor.sizes[i] - 1) * tensor.strides[i];
  }
  return last;
}

}  // namespace

// ---- for kernel_package.py

API void ascend_host_connect_packages(decltype(python.plan) plan, decltype(python.launch) launch,
                                      decltype(python.drop) drop) {
  python = {plan, launch, drop};
}
API void ascend_host_count(uint64_t* live_tensors, uint64_t* live_executors) {
  const std::lock_guard<std::mutex> lock(mutex);
  *live_tensors = tensors.size() + lists.size();
  *live_executors = executors.size();
}

// ---- for the packages

API int ascend_host_first_phase(const char* prototype, const Argument* arguments, uint64_t count,
                                uint64_t* workspace_size, aclOpExecutor** executor) {
  auto made = new aclOpExecutor{};
  const auto reject = [&](int code, const std::string& what) {
    delete made;
    return fail(code, std::string(prototype) + ": " + what);
  };
  for (uint64_t i = 0; i < count; ++i) {
    const Argument& argument = arguments[i];
    if (argument.kind == Argument::kList) {
      if (!list_exists(argument.list)) {
        return reject(kInvalid, std::string(argument.name) + " is no aclIntArray");
      }
      made->lists.push_back(argument.list);
    }
    if (argument.kind > Argument::kOutput) continue;
    if (argument.tensor == nullptr) {
      if (argument.kind == Argument::kOptional) continue;
      return reject(kNullPointer, std::string(argument.name) + " is a null pointer");
    }
    if (!exists(argument.tensor)) {
      return reject(kInvalid, std::string(argument.name) + " is no aclTensor");
    }
    made->tensors.push_back(argument.tensor);
  }
  made->plan = python.plan(prototype, arguments, count, &made->workspace_size);
  if (made->plan < 0) {  // Python has reported why
    delete made;
    return kInvalid;
  }
  *workspace_size = made->workspace_size;
  *executor = made;
  const std::lock_guard<std::mutex> lock(mutex);
  executors.insert(made);
  return kSuccess;
}

API int ascend_host_second_phase(const char* function, void* workspace, uint64_t workspace_size,
                                 aclOpExecutor* executor, void* stream) {
  const std::string name(function);
  if (!take(executor)) return fail(kInvalid, name + ": there is no such executor");
  const aclOpExecutor launched = *executor;
  delete executor;
  const auto reject = [&](const std::string& what) {
    python.drop(launched.plan);
    return fail(kInvalid, name + ": " + what);
  };
  if (!std::all_of(launched.tensors.begin(), launched.tensors.end(), exists)) {
    return reject("a tensor was destroyed before the launch");
  }
  if (!std::all_of(launched.lists.begin(), launched.lists.end(), list_exists)) {
    return reject("a list was destroyed before the launch");
  }
  if (workspace_size != launched.workspace_size || (workspace_size && workspace == nullptr)) {
    return reject("the workspace must have " + std::to_string(launched.workspace_size) +
                  " bytes, got " + std::to_string(workspace ? workspace_size : 0));
  }
  return python.launch(launched.plan, function, workspace, stream) ? kFailedAtRun : kSuccess;
}

// ---- CANN's functions

API aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, int32_t dtype,
                               const int64_t* strides, int64_t offset, int32_t format,
                               const int64_t* storage, uint64_t storage_dimensions, void* data) {
  if (dimensions > kMostDimensions || format != kFormatND || storage_dimensions != 1) {
    fail(kInvalid, "aclCreateTensor: not of format ND in a flat storage");
    return nullptr;
  }
  aclTensor tensor{};
  std::copy_n(sizes, dimensions, tensor.sizes);
  std::copy_n(strides, dimensions, tensor.strides);
  tensor.dimensions = dimensions;
  tensor.offset = offset;
  tensor.elements = storage[0];
  tensor.dtype = dtype;
  tensor.data = data;
  if (last_element(tensor) >= tensor.elements) {
    fail(kInvalid, "aclCreateTensor: the view leads outside its storage");
    return nullptr;
  }
  const auto made = new aclTensor(tensor);
  const std::lock_guard<std::mutex> lock(mutex);
  tensors.insert(made);
  return made;
}

API int aclDestroyTensor(const aclTensor* tensor) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!tensors.erase(tensor)) return fail(kInvalid, "aclDestroyTensor: there is no such tensor");
  }
  delete tensor;
  return kSuccess;
}

API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  const auto copy = new int64_t[size];
  std::copy_n(values, size, copy);
  const auto made = new aclIntArray{copy, size};
  const std::lock_guard<std::mutex> lock(mutex);
  lists.insert(made);
  return made;
}

API int aclDestroyIntArray(const aclIntArray* list) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!lists.erase(list)) return fail(kInvalid, "aclDestroyIntArray: there is no such list");
  }
  delete[] list->values;
  delete list;
  return kSuccess;
}

API int aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!executors.count(executor)) return fail(kInvalid, "there is no such executor");
  executor->repeatable = true;
  return kSuccess;
}

API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!executors.count(executor) || !executor->repeatable) {
      return fail(kInvalid, "aclDestroyAclOpExecutor: there is no such repeatable executor");
    }
    executors.erase(executor);
  }
  python.drop(executor->plan);
  delete executor;
  return kSuccess;
}
