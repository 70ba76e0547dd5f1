// What lets torch_npu load beside a CUDA build of torch. Both register the keys of their allocator
// settings in one set of torch, and torch_npu's registration, in a static initialiser, throws on a
// key that is there already. Apart from cann.cpp, since torch's strings are of the other ABI.
#include <string>
#include <unordered_set>

extern "C" __attribute__((visibility("default"))) void ascend_host_clear_keys(
    std::unordered_set<std::string>& (*keys)()) {
  keys().clear();
}
