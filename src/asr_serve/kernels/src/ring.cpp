// The Python face of the ring: holds the buffer, lends slices of it, lets go of the GIL while it copies much.
#include "ring.hpp"

#include <nanobind/nanobind.h>

#include <optional>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using asr_serve::Ring;

constexpr uint64_t LARGE_BYTES = 64 << 10;  // copying this much takes longer than handing the GIL over

// Another object's memory, contiguous, for as long as this lives.
class Bytes {
 public:
  Bytes(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags)) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  uint64_t size() const { return uint64_t(view_.len); }

 private:
  Py_buffer view_;
};

class PyRing {
 public:
  // What is lent are slices of `memory_`: they keep the buffer alive, and an mmap refuses to close under them.
  explicit PyRing(nb::object buffer)
      : bytes_(buffer, PyBUF_WRITABLE),
        memory_(nb::steal(PyMemoryView_FromObject(buffer.ptr())).attr("cast")("B")),
        readonly_(memory_.attr("toreadonly")()),
        ring_(bytes_.data(), bytes_.size()) {}

  const Ring& ring() const { return ring_; }
  Ring& ring() { return ring_; }

  nb::object lend() {
    std::byte* payload = ring_.lend();
    return payload ? slice(memory_, payload, ring_.payload_bytes()) : nb::none();
  }

  nb::object peek() {
    asr_serve::Slot* slot = ring_.peek();
    if (!slot) return nb::none();
    return nb::make_tuple(slot->session, slot->chunk, slice(readonly_, slot->payload(), slot->used_bytes));
  }

  nb::tuple write(uint64_t session, uint64_t first_chunk, nb::handle source) {
    Bytes bytes(source, PyBUF_SIMPLE);
    return unlocked(bytes, [&] { return ring_.write(session, first_chunk, bytes.data(), bytes.size()); });
  }

  nb::tuple read_into(uint64_t session, uint64_t first_chunk, nb::handle target) {
    Bytes bytes(target, PyBUF_WRITABLE);
    return unlocked(bytes, [&] { return ring_.read_into(session, first_chunk, bytes.data(), bytes.size()); });
  }

 private:
  nb::object slice(nb::handle memory, const std::byte* from, uint64_t bytes) const {
    auto start = Py_ssize_t(from - bytes_.data());
    return memory[nb::slice(start, start + Py_ssize_t(bytes))];
  }

  template <typename Move>
  static nb::tuple unlocked(const Bytes& bytes, Move move) {
    Ring::Moved moved;
    {
      std::optional<nb::gil_scoped_release> release;
      if (bytes.size() >= LARGE_BYTES) release.emplace();
      moved = move();
    }
    return nb::make_tuple(moved.bytes, moved.bell);
  }

  Bytes bytes_;
  nb::object memory_, readonly_;
  Ring ring_;
};

}  // namespace

NB_MODULE(_ring, m) {
  m.doc() = "A single-producer single-consumer ring in shared memory; asr_serve.kernels.ring_reference is the same in Python.";
  nb::set_leak_warnings(false);  // a daemon thread may still hold its ring when the interpreter goes
  m.def("layout", &Ring::layout, "slots"_a, "payload_bytes"_a, "Bytes of memory such a ring needs.");
  m.def(
      "format",
      [](nb::handle buffer, uint64_t slots, uint64_t payload_bytes) {
        Bytes bytes(buffer, PyBUF_WRITABLE);
        Ring::format(bytes.data(), bytes.size(), slots, payload_bytes);
      },
      "buffer"_a, "slots"_a, "payload_bytes"_a, "Make an empty ring in a buffer that nobody is attached to.");
  nb::class_<PyRing>(m, "Ring", "One side of a ring, or an onlooker. One thread at a time.")
      .def(nb::init<nb::object>(), "buffer"_a)
      .def_prop_ro("slots", [](const PyRing& self) { return self.ring().slots(); })
      .def_prop_ro("payload_bytes", [](const PyRing& self) { return self.ring().payload_bytes(); })
      .def_prop_ro("depth", [](const PyRing& self) { return self.ring().depth(); })
      .def_prop_ro("full_count", [](const PyRing& self) { return self.ring().full_count(); })
      .def("lend", &PyRing::lend)
      .def("commit", [](PyRing& self, uint64_t session, uint64_t chunk, uint64_t used_bytes) {
        return self.ring().commit(session, chunk, used_bytes);
      }, "session"_a, "chunk"_a, "used_bytes"_a)
      .def("write", &PyRing::write, "session"_a, "first_chunk"_a, "source"_a)
      .def("producer_sleeps", [](PyRing& self) { return self.ring().producer_sleeps(); })
      .def("peek", &PyRing::peek)
      .def("release", [](PyRing& self) { return self.ring().release(); })
      .def("read_into", &PyRing::read_into, "session"_a, "first_chunk"_a, "target"_a)
      .def("consumer_sleeps", [](PyRing& self) { return self.ring().consumer_sleeps(); });
}
