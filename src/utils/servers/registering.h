// Registers the operators of a package when its library is opened: by dlopen, by
// torch.ops.load_library, or as a program starts that is linked with it. No Python takes part.
//
// cuda_ops/servers.py writes a C++ file of tables, from what it has read of each operator's
// library, with a `Registered` at its end. Only the C shim is used, so one build serves every
// torch from 2.10 on.
#pragma once

#include <dlfcn.h>
#include <elf.h>
#include <torch/csrc/stable/library.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "../checks.h"
#include "../launch.h"

// In libc10: the least level of what torch prints. Null in a torch that has no such variable.
extern __attribute__((weak)) int FLAGS_caffe2_log_level;

namespace cuda_ops {
namespace servers {

template <class T>
struct List {
  const T* values;
  int64_t count;
  const T* begin() const { return values; }
  const T* end() const { return values + count; }
};

using Boxed = void (*)(StableIValue* stack, uint64_t inputs, uint64_t outputs);

// An operator without a tensor argument, whose Device argument says which kernel to call. No key of
// the dispatcher comes from its arguments, so a kernel of BackendSelect chooses, as in
// cuda_ops/dispatch/placed.py.
struct Placed {
  const char *op, *argument;
  int64_t position;
  bool is_optional;
  Boxed cpu, cuda;  // set as they are registered
};

template <Placed& placed>
void select(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  StableIValue& argument = stack[placed.position];
  std::optional<Device> given;
  if (placed.is_optional) {
    given = to<std::optional<Device>>(argument);
  } else {
    given = to<Device>(argument);
  }
  DeviceId device = given ? device_of(*given) : DeviceId{aoti_torch_device_type_cpu(), 0};
  const bool is_cpu = device.type == aoti_torch_device_type_cpu();
  const bool is_cuda = device.type == aoti_torch_device_type_cuda();
  const Boxed kernel = is_cpu ? placed.cpu : is_cuda ? placed.cuda : nullptr;
  if (kernel == nullptr) {
    const std::string known = placed.cpu == nullptr ? "cuda" : placed.cuda ? "cpu or cuda" : "cpu";
    throw std::runtime_error(std::string(placed.op) + ": argument '" + placed.argument +
                             "': expected a device of type " + known + ", got " +
                             (is_cuda ? "cuda" : "another"));
  }
  // C++ gets a device with an index.
  using torch::headeronly::DeviceType;
  if (is_cuda && device.index < 0) {
    detail::check_torch(aoti_torch_get_current_device_index(&device.index), "read the device");
  }
  const Device whole = is_cpu ? Device(DeviceType::CPU) : Device(DeviceType::CUDA, device.index);
  argument = placed.is_optional ? from(std::optional<Device>(whole)) : from(whole);
  kernel(stack, inputs, outputs);
}

struct OpTable {
  const char *name, *schema;
  const detail::Rules* rules;
  List<const char*> keys;  // of its kernels
  Placed* placed;          // with its `select`, or null
  Boxed select;
};

// An operator library that lies beside this one.
struct LibraryTable {
  const char *file, *space;
  List<const char*> manifest;  // cut at each address
  List<OpTable> ops;
};

// What such a library shows; see CUDA_OPS in manifest.h.
struct Functions {
  const char* (*manifest)(const Host*);
  void (*check)(void* checks, const void* rules);
  void (*store)(void* slot, void* call);
};

// Looks for libtorch_cuda when a CUDA kernel runs: it may be opened after this library, or never.
inline AOTITorchError current_cuda_stream(int32_t device, void** stream) {
  static const auto function = [] {
    const char* const name = "aoti_torch_get_current_cuda_stream";
    void* found = dlsym(RTLD_DEFAULT, name);
    if (found == nullptr) {  // Python opens libraries where RTLD_DEFAULT does not look
      void* const cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      if (cuda != nullptr) found = dlsym(cuda, name);
    }
    return reinterpret_cast<AOTITorchError (*)(int32_t, void**)>(found);
  }();
  return function == nullptr ? AOTI_TORCH_FAILURE : function(device, stream);
}

// Opening a file that was cut short would end the process: the system kills what reads beyond the
// end of a mapped file. Linkers write the section headers last.
inline void refuse_damaged(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) throw std::runtime_error(path + ": " + std::strerror(errno));
  Elf64_Ehdr header{};
  const bool is_read = std::fread(&header, sizeof header, 1, file) == 1;
  std::fseek(file, 0, SEEK_END);
  const auto size = static_cast<uint64_t>(std::ftell(file));
  std::fclose(file);
  const uint64_t linked = header.e_shoff + uint64_t(header.e_shentsize) * header.e_shnum;
  if (!is_read || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || size < linked) {
    throw std::runtime_error(path + " is damaged: expected a whole library, got " +
                             std::to_string(size) + " bytes; install it again");
  }
}

// Returns the addresses in a manifest. All other text has to be what the tables were made from,
// schemas and dtypes included, since the rules are those of that text.
inline std::vector<void*> addresses_in(const char* manifest, const List<const char*>& pieces,
                                       const std::string& path) {
  std::vector<void*> found;
  for (const char* const& piece : pieces) {
    if (&piece != pieces.begin()) {
      char* end = nullptr;
      found.push_back(reinterpret_cast<void*>(std::strtoull(manifest, &end, 10)));
      manifest = end;
    }
    const size_t length = std::strlen(piece);
    if (std::strncmp(manifest, piece, length) != 0) {
      throw std::runtime_error(path + " was built from other sources; build both again");
    }
    manifest += length;
  }
  return found;
}

// As cuda_ops/dispatch/by_torch.py reads it.
inline bool cpu_is_torchs() {
  const char* const chosen = std::getenv("CUDA_OPS_CPU");
  return chosen == nullptr || std::strcmp(chosen, "own") != 0;
}

// Keeps a torch before 2.13 from printing an error with its stack, where it is no error here.
struct Quiet {
  static constexpr int kFatal = 3;
  int* const level = torch_exception_get_what_without_backtrace ? nullptr : &FLAGS_caffe2_log_level;
  const int before = level == nullptr ? 0 : std::exchange(*level, kFatal);
  ~Quiet() {
    if (level != nullptr) *level = before;
  }
};

class Registered {
 public:
  explicit Registered(const List<LibraryTable>& tables) noexcept {
    for (const LibraryTable& table : tables) {
      try {
        add(table);
      } catch (const std::exception& error) {  // which may not leave dlopen
        say(names(table) + " cannot be used: " + error.what());
      }
    }
    if (!present_.empty()) {
      say(present_ + ": this process has them already, and keeps those that it has");
    }
  }

 private:
  void add(const LibraryTable& table) {
    const std::string path = own_.substr(0, own_.rfind('/') + 1) + table.file;
    refuse_damaged(path);
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw std::runtime_error(dlerror());
    Functions functions{};
    find(handle, "cuda_ops_manifest", functions.manifest);
    find(handle, "cuda_ops_check", functions.check);
    find(handle, "cuda_ops_store", functions.store);
    const Host host{&current_cuda_stream};
    const std::vector<void*> addresses =
        addresses_in(functions.manifest(&host), table.manifest, path);
    TorchLibraryHandle library = nullptr;  // never deleted: definitions live as long as the process
    detail::check_torch(
        aoti_torch_library_init_fragment(table.space, own_.c_str(), __LINE__, &library),
        "define operators");
    void* const* address = addresses.data();
    for (const OpTable& op : table.ops) {
      void* const checks = *address++;
      const bool is_ours = define(library, table, op);
      if (is_ours) functions.check(checks, op.rules);  // before a kernel can be called
      for (const char* const key : op.keys) {
        void *const call = *address++, *const trampoline = *address++, *const slot = *address++;
        void* const by_torch = *address++;
        if (!is_ours) continue;
        functions.store(slot, by_torch != nullptr && cpu_is_torchs() ? by_torch : call);
        add_kernel(table, op, key, reinterpret_cast<Boxed>(trampoline));
        if (op.placed != nullptr) {
          const auto kernel = reinterpret_cast<Boxed>(trampoline);
          (std::strcmp(key, "CPU") == 0 ? op.placed->cpu : op.placed->cuda) = kernel;
        }
      }
      if (is_ours && op.placed != nullptr) {
        add_kernel(table, op, "BackendSelect", op.select);
      }
    }
  }

  // In the namespace of the table, which need not be that of the operator's binding.
  void add_kernel(const LibraryTable& table, const OpTable& op, const char* key,
                  Boxed kernel) const {
    TorchLibraryHandle handle = nullptr;  // never deleted, as above
    if (aoti_torch_library_init_impl(table.space, key, own_.c_str(), __LINE__, &handle) != 0 ||
        torch_library_impl(handle, op.name, kernel, TORCH_ABI_VERSION) != 0) {
      say(name(table, op) + ": torch refused its " + key + " kernel: " + reason());
    }
  }

  // Returns whether the operator is new. The C shim can ask in no other way than by defining it.
  bool define(TorchLibraryHandle library, const LibraryTable& table, const OpTable& op) {
    const Quiet quiet;
    if (aoti_torch_library_def(library, op.schema) == TORCH_SUCCESS) return true;
    const std::string why = reason();
    if (why.empty() || why.find("multiple times") != std::string::npos) {
      present_ += (present_.empty() ? "" : ", ") + name(table, op);
    } else {
      say(name(table, op) + ": torch refused its schema: " + why);
    }
    return false;
  }

  template <class F>
  static void find(void* handle, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (function == nullptr) throw std::runtime_error(dlerror());
  }

  static std::string name(const LibraryTable& table, const OpTable& op) {
    return std::string(table.space) + "::" + op.name;
  }

  static std::string names(const LibraryTable& table) {
    std::string text;
    for (const OpTable& op : table.ops) text += (text.empty() ? "" : ", ") + name(table, op);
    return text;
  }

  // What torch says of the error; nothing before 2.13, which prints it itself.
  static std::string reason() {
    const bool is_said = torch_exception_get_what_without_backtrace != nullptr;
    return is_said ? torch_exception_get_what_without_backtrace() : "";
  }

  void say(const std::string& text) const {
    std::fprintf(stderr, "%s: %s\n", own_.c_str() + own_.rfind('/') + 1, text.c_str());
  }

  // Where this library is, without symbolic links: the operators' libraries lie beside it.
  static std::string own_path() {
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(&refuse_damaged), &info) == 0) return "";
    char* const path = realpath(info.dli_fname, nullptr);
    const std::string found = path == nullptr ? info.dli_fname : path;
    std::free(path);
    return found;
  }

  // torch keeps the pointer to it, for the messages about what is defined twice.
  const std::string& own_ = *new std::string(own_path());
  std::string present_;
};

}  // namespace servers
}  // namespace cuda_ops
