// Lets torch_npu load with a CUDA build of torch. Both register the keys of their allocator
// settings in one set of torch, and torch_npu's static initialiser throws on a duplicate key.
// Separate from cann.cpp, because torch uses the other string ABI.
#include <string>
#include <unordered_set>

extern "C" __attribute__((visibility("default"))) void ascend_host_clear_keys(
    std::unordered_set<std::string>* keys) {
  keys->clear();
}
