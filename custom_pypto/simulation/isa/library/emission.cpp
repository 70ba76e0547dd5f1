// PyPTO built without CANN generates the code of each task and drops it; built with CANN it writes
// the code into a file. Two replaced functions add the missing call of GenCodeToBinaryTask:
// GenFuncEnd keeps the text, and UpdateSubFunc, which follows, first writes it.
#define _GLIBCXX_USE_CXX11_ABI 0  // PyPTO's strings
#include <cstdint>
#include <string>

namespace {

struct Leaf {  // passed like a std::pair of both
  uint64_t id;
  void* function;
};
thread_local void* current;

}  // namespace

extern "C" {

// PyPTO's own functions
void (*isa_end_text)(const void* codegen, void* text);
void (*isa_update)(const void* codegen, Leaf leaf, const void* names);
void (*isa_write_text)(const void*, void* text, const void* names, const std::string& options);

void isa_end_and_keep(const void* codegen, void* text) {
  isa_end_text(codegen, text);
  current = text;
}

void isa_write_and_update(const void* codegen, Leaf leaf, const void* names) {
  isa_write_text(codegen, current, names, std::string());
  isa_update(codegen, leaf, names);
}
}
