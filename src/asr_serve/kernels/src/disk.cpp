// Reads and writes of a file by io_uring: many pieces under way at once, from one thread, past the page cache.
// By system calls alone, so that nothing has to be installed. Source: io_uring(7), io_uring_setup(2), io_uring_enter(2).
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// An errno on its way to Python, where it becomes an OSError, in words of its own or the system's.
struct Failed {
  int code;
  const char* words = nullptr;
};

[[noreturn]] void raise(const Failed& failed) {
  PyObject* arguments = Py_BuildValue("(is)", failed.code, failed.words ? failed.words : std::strerror(failed.code));
  PyErr_SetObject(PyExc_OSError, arguments);
  Py_XDECREF(arguments);
  throw nb::python_error();
}

}  // namespace

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Memory shared with the kernel.
class Mapping {
 public:
  Mapping(int fd, size_t bytes, uint64_t at)
      : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, off_t(at))) {
    if (data_ == MAP_FAILED) throw Failed{errno};
  }
  ~Mapping() { munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <typename T>
  T* at(uint32_t offset) const { return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset); }

 private:
  size_t bytes_;
  void* data_;
};

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { if (fd_ >= 0) close(fd_); }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  operator int() const { return fd_; }

 private:
  int fd_;
};

int setup(unsigned depth, io_uring_params& params) {
  long fd = syscall(SYS_io_uring_setup, depth, &params);
  if (fd < 0) throw Failed{errno};
  return int(fd);
}

// A part of an extent that is with the kernel, or waits for a place.
struct Piece {
  uint64_t offset;
  std::byte* memory;
  uint32_t bytes;
  uint32_t extent;
};

// One memory of Python's, held for as long as the kernel may touch it.
class Extent {
 public:
  Extent(uint64_t offset, nb::handle object, bool writable) : offset_(offset) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) throw nb::python_error();
  }
  ~Extent() { PyBuffer_Release(&view_); }
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;

  uint64_t offset() const { return offset_; }
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  uint64_t bytes() const { return uint64_t(view_.len); }

  uint64_t cut = 0;   // bytes that were made into pieces
  uint64_t left = 0;  // bytes that are not done

 private:
  uint64_t offset_;
  Py_buffer view_;
};

constexpr uint32_t BLOCK = 4096;   // a rest begins on such: the kernel takes no other
constexpr unsigned PATIENCE = 64;  // completions after which Python may look around

// One queue: one transfer of many extents at a time, from one thread. After an error, wait for the rest by `drain`.
class Uring {
 public:
  Uring(unsigned depth, uint32_t piece_bytes)
      : piece_bytes_(piece_bytes),
        fd_(setup(depth, params_)),
        submissions_(fd_, params_.sq_off.array + params_.sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING),
        completions_(fd_, params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING),
        entries_(fd_, params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
    pieces_.resize(depth);
  }
  // The kernel may still write to what the extents hold: `drain` came first, or nothing was begun.
  ~Uring() { drain(); }

  void begin(int fd, bool write, std::vector<std::unique_ptr<Extent>> extents) {
    file_ = fd;
    write_ = write;
    extents_ = std::move(extents);
    for (auto& extent : extents_) extent->left = extent->bytes();
    next_ = done_ = 0;
    finished_.clear();
    again_.clear();
    free_.clear();  // also those that the kernel did not take
    for (auto slot = unsigned(pieces_.size()); slot > 0; slot--) free_.push_back(slot - 1);
  }

  // The number of an extent that is done; -1: none yet, call again; -2: all of them are.
  // Throws Failed once a piece has failed; then nothing more is submitted.
  int64_t wait() {
    if (done_ == extents_.size()) return -2;
    for (unsigned seen = 0; finished_.empty(); ) {
      submit();
      unsigned reaped = reap();
      seen += reaped;
      if (finished_.empty() && seen >= PATIENCE) return -1;
      if (!reaped && finished_.empty()) enter(0, 1);
    }
    int64_t extent = finished_.back();
    finished_.pop_back();
    done_++;
    return extent;
  }

  // Nothing is under way when it returns, and nothing of Python's is held.
  void drain() noexcept {
    halted_ = true;
    while (under_way_) {
      syscall(SYS_io_uring_enter, int(fd_), 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      try {
        reap();
      } catch (const Failed&) {
      }
    }
    halted_ = false;
  }
  void forget() { extents_.clear(); done_ = next_ = 0; }

 private:
  void enter(unsigned submitted, unsigned wanted) {
    while (syscall(SYS_io_uring_enter, int(fd_), submitted, wanted, wanted ? IORING_ENTER_GETEVENTS : 0u, nullptr, 0) < 0) {
      if (errno == EINTR && wanted && !submitted) return;  // a signal: what has come is looked at, and then again
      if (errno != EINTR && errno != EAGAIN && errno != EBUSY) throw Failed{errno};
    }
  }

  bool cut(Piece& piece) {
    if (!again_.empty()) {
      piece = again_.back();
      again_.pop_back();
      return true;
    }
    while (next_ < extents_.size() && extents_[next_]->cut == extents_[next_]->bytes()) {
      if (!extents_[next_]->bytes()) finished_.push_back(uint32_t(next_));
      next_++;
    }
    if (next_ == extents_.size()) return false;
    Extent& extent = *extents_[next_];
    auto bytes = uint32_t(std::min<uint64_t>(piece_bytes_, extent.bytes() - extent.cut));
    piece = {extent.offset() + extent.cut, extent.data() + extent.cut, bytes, uint32_t(next_)};
    extent.cut += bytes;
    return true;
  }

  // Everything for which there is a place goes to the kernel.
  void submit() {
    std::atomic_ref tail(*submissions_.at<uint32_t>(params_.sq_off.tail));
    uint32_t mask = *submissions_.at<uint32_t>(params_.sq_off.ring_mask);
    auto* array = submissions_.at<uint32_t>(params_.sq_off.array);
    uint32_t at = tail.load(std::memory_order_relaxed);
    unsigned added = 0;
    Piece piece;
    while (!free_.empty() && cut(piece)) {
      unsigned slot = free_.back();
      free_.pop_back();
      pieces_[slot] = piece;
      uint32_t index = at & mask;
      io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
      std::memset(&entry, 0, sizeof entry);
      entry.opcode = write_ ? IORING_OP_WRITE : IORING_OP_READ;
      entry.fd = file_;
      entry.off = piece.offset;
      entry.addr = uint64_t(piece.memory);
      entry.len = piece.bytes;
      entry.user_data = slot;
      array[index] = index;
      at++;
      added++;
    }
    if (!added) return;
    tail.store(at, std::memory_order_release);
    under_way_ += added;
    while (added) {
      long taken = syscall(SYS_io_uring_enter, int(fd_), added, 0, 0, nullptr, 0);
      if (taken > 0) added -= unsigned(taken);
      else if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        int code = errno;
        tail.store(at - added, std::memory_order_release);  // those the kernel did not take are nowhere
        under_way_ -= added;
        throw Failed{code};
      }
    }
  }

  unsigned reap() {
    std::atomic_ref head(*completions_.at<uint32_t>(params_.cq_off.head));
    std::atomic_ref tail(*completions_.at<uint32_t>(params_.cq_off.tail));
    uint32_t mask = *completions_.at<uint32_t>(params_.cq_off.ring_mask);
    auto* ready = completions_.at<io_uring_cqe>(params_.cq_off.cqes);
    uint32_t from = head.load(std::memory_order_relaxed), to = tail.load(std::memory_order_acquire);
    Failed failed{0};
    for (uint32_t at = from; at != to; at++) {
      auto slot = unsigned(ready[at & mask].user_data);
      int result = ready[at & mask].res;
      Piece piece = pieces_[slot];
      free_.push_back(slot);
      under_way_--;
      if (halted_) continue;
      if (result == -EINTR || result == -EAGAIN) {
        again_.push_back(piece);
        continue;
      }
      if (result < 0) {
        failed = {-result};
        continue;
      }
      uint32_t moved = uint32_t(result) == piece.bytes ? piece.bytes : uint32_t(result) / BLOCK * BLOCK;
      extents_[piece.extent]->left -= moved;
      if (moved == piece.bytes) {
        if (!extents_[piece.extent]->left) finished_.push_back(piece.extent);
      } else if (moved) {
        again_.push_back({piece.offset + moved, piece.memory + moved, piece.bytes - moved, piece.extent});
      } else {
        failed = {write_ ? ENOSPC : ENODATA, write_ ? "nothing was taken" : "the file ends before"};
      }
    }
    head.store(to, std::memory_order_release);
    if (failed.code) throw failed;
    return to - from;
  }

  uint32_t piece_bytes_;
  io_uring_params params_{};
  Fd fd_;
  Mapping submissions_, completions_, entries_;
  std::vector<Piece> pieces_;  // by slot: a slot is what a completion says
  std::vector<unsigned> free_;
  std::vector<Piece> again_;
  std::vector<std::unique_ptr<Extent>> extents_;
  std::vector<uint32_t> finished_;
  size_t next_ = 0, done_ = 0;
  unsigned under_way_ = 0;
  int file_ = -1;
  bool write_ = false, halted_ = false;
};

}  // namespace

#else

namespace {

struct Extent {
  Extent(uint64_t, nb::handle, bool) {}
};

struct Uring {
  Uring(unsigned, uint32_t) { throw Failed{ENOSYS, "this system has no io_uring"}; }
  void begin(int, bool, std::vector<std::unique_ptr<Extent>>) {}
  int64_t wait() { return -2; }
  void drain() noexcept {}
  void forget() {}
};

}  // namespace

#endif

NB_MODULE(_disk, m) {
  m.doc() = "A file's reads and writes by io_uring. asr_serve.transfer.disk.thread_pool does the same in Python.";
  nb::set_leak_warnings(false);  // a daemon thread may still hold its queue when the interpreter goes
  nb::class_<Uring>(m, "Uring", "A queue of so many pieces under way. One thread at a time. Raises OSError.")
      .def("__init__", [](Uring* self, unsigned depth, uint32_t piece_bytes) {
        try {
          new (self) Uring(depth, piece_bytes);
        } catch (const Failed& failed) {
          raise(failed);
        }
      }, "depth"_a, "piece_bytes"_a)
      .def("begin", [](Uring& self, int fd, bool write, nb::sequence extents) {
        std::vector<std::unique_ptr<Extent>> held;
        for (nb::handle pair : extents)
          held.push_back(std::make_unique<Extent>(nb::cast<uint64_t>(pair[0]), pair[1], !write));
        self.begin(fd, write, std::move(held));
      }, "fd"_a, "write"_a, "extents"_a, "Take (offset, memory) pairs, which `wait` then moves.")
      .def("wait", [](Uring& self) {
        Failed failed{0};
        int64_t extent = 0;
        {
          nb::gil_scoped_release release;
          try {
            extent = self.wait();
          } catch (const Failed& caught) {
            failed = caught;
          }
        }
        if (failed.code) raise(failed);
        return extent;
      }, "The number of an extent that is done; -1: none yet, call again; -2: all were told.")
      .def("finish", [](Uring& self) {
        {
          nb::gil_scoped_release release;
          self.drain();
        }
        self.forget();
      }, "Wait for what is under way, and let go of all memory. After `begin`, whatever came of it.");
}
