// Memory for arrays that are read at random: on huge pages where the system gives them, since most reads of small pages
// miss the processor's table of pages too.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <vector>

namespace asr_serve {

template <typename T>
struct HugePageAllocator {
  using value_type = T;
  static constexpr size_t kPage = size_t(1) << 21;

  HugePageAllocator() = default;
  template <typename U>
  HugePageAllocator(const HugePageAllocator<U>&) {}

  T* allocate(size_t count) {
    size_t bytes = count * sizeof(T);
    if (bytes >= kPage) bytes = (bytes + kPage - 1) / kPage * kPage;
    void* memory = bytes >= kPage ? std::aligned_alloc(kPage, bytes) : std::malloc(bytes);
    if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (bytes >= kPage) madvise(memory, bytes, MADV_HUGEPAGE);  // refused, small pages do
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { std::free(memory); }
  friend bool operator==(const HugePageAllocator&, const HugePageAllocator&) { return true; }
};

template <typename T>
using HugePageVector = std::vector<T, HugePageAllocator<T>>;

}  // namespace asr_serve
