// Stacks that take turns. What ucontext.h has for this asks the operating system for the signal mask at every switch,
// which takes longer than all that a fiber does in between.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __x86_64__

extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** from, void* to);

// By the System V ABI: what a called function has to keep is pushed, the rest is the caller's. Weak, because every file
// that includes this has it.
asm(R"(
.text
.hidden emulator_switch
.weak emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, . - emulator_switch
)");

namespace emulator {

struct Context {
  void* stack;
};

inline void switch_context(Context& from, Context& to) {
  emulator_switch(&from.stack, to.stack);
}

// `enter` never returns.
inline void begin_context(Context& context, char* stack, size_t bytes, void (*enter)()) {
  auto* top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t(15));
  *--top = nullptr;  // where a return address would be: the stack is aligned as after a call
  *--top = reinterpret_cast<void*>(enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack = top;
}

}  // namespace emulator

#else
#include <ucontext.h>

namespace emulator {

using Context = ucontext_t;

inline void switch_context(Context& from, Context& to) {
  swapcontext(&from, &to);
}

inline void begin_context(Context& context, char* stack, size_t bytes, void (*enter)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
}

}  // namespace emulator

#endif
