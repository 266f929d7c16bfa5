// Memory that one call needs for itself: a block of torch's allocator, cut into aligned parts.
//
// Take one for each call and let go of it when the work is queued. torch's allocator then gives the
// block to later work of the same stream only, so no kernel that still runs sees it change; while a
// CUDA graph is captured, the block comes from the graph's own pool and stays there for replays. A
// pointer that is kept between calls has neither: two streams would write to it at once, and a
// graph would go on writing to what was freed since.
#pragma once

#include <limits>
#include <type_traits>

#include "division.h"
#include "layout.h"
#include "tensor.h"

namespace cuda_ops {

class Workspace {
 public:
  // Where parts begin: what the widest copies ask for, and what cudaMalloc gives.
  static constexpr int64_t kAlignment = 256;

  // What `count` elements of T take up, the gap before the next part included.
  template <class T>
  static constexpr int64_t bytes_of(int64_t count) {
    return ceil_div(count * int64_t(sizeof(T)), kAlignment) * kAlignment;
  }

  // `bytes` on the device of `like`, uninitialized; 0 takes no memory.
  Workspace(int64_t bytes, const Tensor& like) : bytes_(bytes) {
    if (bytes < 0) {
      throw std::runtime_error("cuda_ops: Workspace: expected bytes from 0 on, got " +
                               std::to_string(bytes));
    }
    if (bytes == 0) return;
    // torch aligns memory of a GPU to more than this, and that of a CPU to less.
    const bool on_cuda = device_of(like).type == aoti_torch_device_type_cuda();
    const int64_t more = on_cuda ? 0 : kAlignment - 1;
    block_ = empty({bytes + more}, DType::kUInt8, like);
    const auto start = reinterpret_cast<uintptr_t>(block_->mutable_data_ptr());
    const int64_t skipped = int64_t(-start % uintptr_t(kAlignment));
    if (skipped > more) {  // an allocator of someone else's
      throw std::runtime_error("cuda_ops: Workspace: expected memory aligned to " +
                               std::to_string(kAlignment) + " bytes");
    }
    data_ = reinterpret_cast<char*>(start) + skipped;
  }

  // A copy would cut the same memory once more.
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  Workspace(Workspace&&) = default;
  Workspace& operator=(Workspace&&) = default;

  // The next part, of `count` elements; null for none. Parts do not overlap.
  template <class T>
  T* take(int64_t count) {
    static_assert(std::is_trivially_copyable_v<T>, "take() makes no objects: the memory is raw");
    static_assert(alignof(T) <= size_t(kAlignment), "take() aligns parts to 256 bytes");
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / int64_t(sizeof(T)) - kAlignment;
    // The last part may end where its elements do.
    if (count < 0 || count > kMost || count * int64_t(sizeof(T)) > left()) {
      throw std::runtime_error("cuda_ops: Workspace: take() of " + std::to_string(count) +
                               " elements of " + std::to_string(sizeof(T)) + " bytes, " +
                               std::to_string(left()) + " of " + std::to_string(bytes_) +
                               " bytes are left");
    }
    if (count == 0) return nullptr;
    T* const part = reinterpret_cast<T*>(data_ + taken_);
    taken_ += bytes_of<T>(count);
    return part;
  }

  // All of it, for a kernel that cuts it itself; null for no bytes.
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int64_t left() const { return taken_ < bytes_ ? bytes_ - taken_ : 0; }

 private:
  int64_t bytes_ = 0, taken_ = 0;
  std::optional<Tensor> block_;
  char* data_ = nullptr;
};

}  // namespace cuda_ops
