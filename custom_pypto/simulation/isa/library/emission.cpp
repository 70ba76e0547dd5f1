// PyPTO built without CANN generates the code of each task and drops it, where one built with CANN
// writes it into a file. These call there what the latter calls: they take the place of the end of
// a text, which shows the text, and of the use of its name.
#define _GLIBCXX_USE_CXX11_ABI 0  // PyPTO's strings
#include <cstdint>
#include <string>

namespace {

struct Leaf {  // passed as a std::pair of these is
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
