// Chooses the CPU kernels once: the best that the processor and the operating system support, or the ones that the
// environment variable TILED_ATTENTION_ISA names.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace tiled_attention {

namespace baseline {
extern const Kernels kernels;
}
#ifdef __x86_64__
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}
#endif

namespace {

// Each set contains the one before it, so what a CPU runs is a prefix of the list.
const Kernels* const all_kernels[] = {
    &baseline::kernels,
#ifdef __x86_64__
    &avx2::kernels,
    &avx512::kernels,
    &avx512bf16::kernels,
#endif
};

int count_available() {
#ifdef __x86_64__
  __builtin_cpu_init();
  // Not every compiler's __builtin_cpu_supports knows f16c. Whoever supports avx saves its registers.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  if (!(f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return 1;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))) {
    return 2;
  }
  return __builtin_cpu_supports("avx512bf16") ? 4 : 3;
#else
  return 1;
#endif
}

int num_available() {
  static const int count = count_available();
  return count;
}

const Kernels* choose() {
  const char* wanted = std::getenv("TILED_ATTENTION_ISA");
  if (!wanted || !*wanted) return all_kernels[num_available() - 1];
  if (const Kernels* found = find_kernels(wanted)) return found;
  std::string message = "the environment variable TILED_ATTENTION_ISA must name an instruction set of this CPU (";
  for (int i = 0; i < num_available(); ++i) message.append(i ? ", " : "").append(all_kernels[i]->isa);
  throw std::runtime_error(message + "), got " + wanted);
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

// Throws std::runtime_error, at every call, while TILED_ATTENTION_ISA is wrong and set_kernels() was not called.
const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_acquire);
  if (current) return *current;
  const Kernels* choice = choose();
  // Whoever called set_kernels() in between keeps its choice.
  return chosen.compare_exchange_strong(current, choice, std::memory_order_acq_rel) ? *choice : *current;
}

const Kernels* find_kernels(const char* isa) {
  for (int i = 0; i < num_available(); ++i) {
    if (std::strcmp(isa, all_kernels[i]->isa) == 0) return all_kernels[i];
  }
  return nullptr;
}

void set_kernels(const Kernels& kernels) { chosen.store(&kernels, std::memory_order_release); }

int available_isas(const char* (&names)[4]) {
  for (int i = 0; i < num_available(); ++i) names[i] = all_kernels[i]->isa;
  return num_available();
}

}  // namespace tiled_attention
