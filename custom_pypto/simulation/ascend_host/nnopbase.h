// Shared by the simulator's libnnopbase.so and the kernel packages of kernel_package.py; the
// structs are read in Python, too.
#pragma once

#include <cstdint>

constexpr int kMostDimensions = 16;

struct aclTensor {
  int64_t sizes[kMostDimensions], strides[kMostDimensions];
  uint64_t dimensions;
  int64_t offset, elements;  // of the storage
  int32_t dtype;
  void* data;
};

struct aclIntArray {
  const int64_t* values;
  uint64_t size;
};

struct aclOpExecutor;

// An argument of a first phase, by its name in the prototype.
struct Argument {
  enum Kind : int32_t { kRequired, kOptional, kOutput, kInteger, kReal, kBool, kText, kList };
  const char* name;
  Kind kind;
  const aclTensor* tensor;
  int64_t integer;
  double real;
  const char* text;
  const aclIntArray* list;
};

#define API extern "C" __attribute__((visibility("default")))

API int ascend_host_first_phase(const char* prototype, const Argument* arguments, uint64_t count,
                                uint64_t* workspace_size, aclOpExecutor** executor);
API int ascend_host_second_phase(const char* function, void* workspace, uint64_t workspace_size,
                                 aclOpExecutor* executor, void* stream);
