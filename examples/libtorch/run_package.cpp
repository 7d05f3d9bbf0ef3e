// A model that Python exported, without Python: run_package LIBRARY PACKAGE SAMPLES
//   LIBRARY  the operator library, as `python -m tiled_attention info --library` prints it
//   PACKAGE  what AOTInductor made, by export_package.py
//   SAMPLES  a list of pairs (input, output of the model in Python), saved by torch.save
// Prints a line for each sample; exits with 1 if an output is off or Python is in the process, and with 2 if there is nothing to run.

#include <ATen/TensorOperators.h>
#include <dlfcn.h>
#include <link.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void load_operators(const char* path) {
  if (!dlopen(path, RTLD_NOW)) throw std::runtime_error(std::string("the operator library cannot be loaded: ") + dlerror());
}

std::vector<char> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The interpreter, or torch's part that needs it, among the libraries of this process.
bool python_is_here() {
  const auto look = [](dl_phdr_info* info, size_t, void* found) {
    const char* slash = std::strrchr(info->dlpi_name, '/');
    const char* name = slash ? slash + 1 : info->dlpi_name;
    *static_cast<bool*>(found) |= std::strncmp(name, "libpython", 9) == 0 || std::strncmp(name, "libtorch_python", 15) == 0;
    return 0;
  };
  bool found = false;
  dl_iterate_phdr(look, &found);
  return found;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) throw std::runtime_error("usage: run_package LIBRARY PACKAGE SAMPLES");
  load_operators(argv[1]);
  const c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  int misses = 0;
  const c10::IValue samples = torch::jit::pickle_load(read(argv[3]));
  for (const c10::IValue& sample : samples.toListRef()) {
    const auto& pair = sample.toTupleRef().elements();
    const at::Tensor input = pair[0].toTensor(), expected = pair[1].toTensor();
    const at::Tensor out = model.run({input}).at(0);
    // Compiled code adds in another order than Python did.
    const double difference = (out - expected).abs().max().item<double>(), allowed = 1e-5 * expected.abs().max().item<double>();
    const bool right = out.sizes() == expected.sizes() && difference <= allowed;
    misses += !right;
    std::printf("seqlen %4lld: difference %.1e, allowed %.1e%s\n", static_cast<long long>(input.size(1)), difference, allowed, right ? "" : "  WRONG");
  }
  if (python_is_here()) ++misses, std::printf("Python is loaded\n");
  std::printf(misses ? "%d wrong\n" : "all right\n", misses);
  return misses ? 1 : 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 2;
}
