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

#ifdef TILED_ATTENTION_ISA_BASELINE
namespace baseline {
extern const Kernels kernels;
}
#endif
#ifdef TILED_ATTENTION_ISA_AVX2
namespace avx2 {
extern const Kernels kernels;
}
#endif
#ifdef TILED_ATTENTION_ISA_AVX512
namespace avx512 {
extern const Kernels kernels;
}
#endif
#ifdef TILED_ATTENTION_ISA_AVX512BF16
namespace avx512bf16 {
extern const Kernels kernels;
}
#endif

namespace {

// Each set contains the one before it. `level`: how many of the four a CPU must run.
const struct {
  const Kernels* kernels;
  int level;
} built[] = {
#ifdef TILED_ATTENTION_ISA_BASELINE
    {&baseline::kernels, 1},
#endif
#ifdef TILED_ATTENTION_ISA_AVX2
    {&avx2::kernels, 2},
#endif
#ifdef TILED_ATTENTION_ISA_AVX512
    {&avx512::kernels, 3},
#endif
#ifdef TILED_ATTENTION_ISA_AVX512BF16
    {&avx512bf16::kernels, 4},
#endif
};

int find_level() {
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

// What this CPU runs of what was built is a prefix of the list.
int num_available() {
  static const int count = [] {
    const int level = find_level();
    int n = 0;
    for (const auto& entry : built) n += entry.level <= level;
    return n;
  }();
  return count;
}

const Kernels* choose() {
  const char* wanted = std::getenv("TILED_ATTENTION_ISA");
  if (num_available() == 0)
    throw std::runtime_error("tiled_attention was built for instruction sets that this CPU lacks: see TILED_ATTENTION_ISAS in setup.py");
  if (!wanted || !*wanted) return built[num_available() - 1].kernels;
  if (const Kernels* found = find_kernels(wanted)) return found;
  std::string message = "the environment variable TILED_ATTENTION_ISA must name an instruction set of this CPU (";
  for (int i = 0; i < num_available(); ++i) message.append(i ? ", " : "").append(built[i].kernels->isa);
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
    if (std::strcmp(isa, built[i].kernels->isa) == 0) return built[i].kernels;
  }
  return nullptr;
}

void set_kernels(const Kernels& kernels) { chosen.store(&kernels, std::memory_order_release); }

int available_isas(const char* (&names)[4]) {
  for (int i = 0; i < num_available(); ++i) names[i] = built[i].kernels->isa;
  return num_available();
}

}  // namespace tiled_attention
