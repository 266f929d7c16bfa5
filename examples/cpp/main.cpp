// Runs what export.py wrote, without Python.
//
//   serve LIBRARY FOLDER
//
// LIBRARY is what `python -m cuda_ops library` prints. The program compares with the output that
// export.py saved and ends with status 1 where they differ.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// An operator by its name in the dispatcher.
at::Tensor cuda_ops_silu(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cuda_ops::silu", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

at::Tensor saved(const std::string& file, const char* name) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot read " + file);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), {}};
  return torch::jit::pickle_load(bytes).toGenericDict().at(name).toTensor();
}

// Returns whether the results are those that export.py saved.
bool compare(const char* what, const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes()) throw std::runtime_error("another shape");
  const double error = (actual.cpu() - expected).abs().max().item<double>();
  std::printf("%s: largest error %.1e\n", what, error);
  return error < 1e-5;  // a NaN is not
}

bool run(const std::string& folder, const std::string& device) {
  const std::string file = folder + "/" + device;
  const at::Tensor x = saved(file + ".pt", "x").to(device);
  torch::inductor::AOTIModelPackageLoader model(file + ".pt2");
  const at::Tensor y = model.run({x}).at(0);
  return compare((device + " model").c_str(), y, saved(file + ".pt", "expected")) &&
         compare((device + " silu").c_str(), cuda_ops_silu(x), at::silu(x).cpu());
}

// Says what an operator answers to arguments that it does not take.
bool refuses() {
  try {
    cuda_ops_silu(at::zeros({3}, at::kInt));
  } catch (const std::exception& error) {
    const std::string text = error.what();
    std::printf("%s\n", text.substr(0, text.find('\n')).c_str());
    return true;
  }
  std::printf("silu took a tensor of integers\n");
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s LIBRARY FOLDER\n", argv[0]);
    return 2;
  }
  if (dlopen(argv[1], RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  try {
    const at::InferenceMode inference;
    bool fine = run(argv[2], "cpu") && refuses();
    if (at::hasCUDA() && std::ifstream(std::string(argv[2]) + "/cuda.pt2")) {
      fine = run(argv[2], "cuda") && fine;
    } else {
      std::printf("cuda: not run, as there is no GPU here or was none at the export\n");
    }
    return fine ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
