// Datagrams in batches: by recvmmsg, and past the kernel's stack by AF_XDP, with a table of expected flows in front.
// Source: recvmmsg(2), socket(7), Documentation/networking/af_xdp.rst.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

#if defined(__linux__)
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "packet_flows.hpp"
#include "xdp_socket.hpp"

#ifndef SO_RXQ_OVFL
#define SO_RXQ_OVFL 40
#endif

namespace {

using namespace packets;

// Number of what Python calls here, which `asr_serve.kernels` expects: a change of a name or an argument raises both.
constexpr int INTERFACE = 1;
constexpr size_t CONTROL_BYTES = 128;
constexpr unsigned MAX_BATCH = 4096;
constexpr int MAX_GATHER_US = 100'000;

[[noreturn]] void raise_errno(int number, const char* what) {
  nb::object error = nb::steal(PyObject_CallFunction(PyExc_OSError, "is", number, what));
  if (error.is_valid()) PyErr_SetObject(PyExc_OSError, error.ptr());
  throw nb::python_error();
}

// Calls what makes system calls; their failure is an OSError.
template <typename Work>
auto checked(Work work) {
  try {
    return work();
  } catch (const std::system_error& error) {
    raise_errno(error.code().value(), error.what());
  }
}

void write_key(const sockaddr_storage& from, Key& key) {
  if (from.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(from);
    std::memset(key.data(), 0, 10);
    std::memset(key.data() + 10, 0xff, 2);
    std::memcpy(key.data() + 12, &v4.sin_addr, 4);
    std::memcpy(key.data() + 16, &v4.sin_port, 2);
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(from);
    std::memcpy(key.data(), &v6.sin6_addr, 16);
    std::memcpy(key.data() + 16, &v6.sin6_port, 2);
  }
}

Key read_key(const nb::bytes& bytes) {
  if (bytes.size() != KEY_BYTES) throw std::invalid_argument("a source is 16 bytes of address and 2 of port");
  Key key;
  std::memcpy(key.data(), bytes.c_str(), KEY_BYTES);
  return key;
}

// AF_XDP socket with the UMEM it receives into, a writable buffer that stays its owner's.
class Xsk {
 public:
  Xsk(nb::handle memory, uint32_t frame_bytes, uint32_t ring, uint32_t interface, uint32_t queue, bool zero_copy, int busy_poll_us) {
    if (PyObject_GetBuffer(memory.ptr(), &view_, PyBUF_WRITABLE)) throw nb::python_error();
    const size_t bytes = size_t(view_.len), frames = frame_bytes ? bytes / frame_bytes : 0;
    auto power = [](uint64_t number) { return number && !(number & (number - 1)); };
    if (!power(frame_bytes) || frame_bytes < 2048 || frame_bytes > 4096 || !power(frames) || frames > (1 << 20) ||
        bytes % frame_bytes || !power(ring) || ring > frames) {
      PyBuffer_Release(&view_);
      throw std::invalid_argument("frames of 2048 or 4096 bytes, whose number and the ring's length are powers of two");
    }
    try {
      socket_ = checked([&] {
        return std::make_unique<XdpSocket>(static_cast<uint8_t*>(view_.buf), bytes, frame_bytes, ring, interface, queue, zero_copy,
                                           busy_poll_us);
      });
    } catch (...) {
      PyBuffer_Release(&view_);
      throw;
    }
  }
  Xsk(const Xsk&) = delete;
  ~Xsk() { close(); }

  XdpSocket* socket() { return socket_.get(); }
  void close() {
    if (!socket_) return;
    socket_.reset();
    PyBuffer_Release(&view_);
  }

 private:
  Py_buffer view_{};
  std::unique_ptr<XdpSocket> socket_;
};

class Receiver {
 public:
  Receiver(std::vector<int> fds, nb::list xdp, unsigned batch, unsigned slot_bytes, int gather_us)
      : batch_(batch), slot_bytes_(slot_bytes), gather_us_(gather_us), owners_(xdp) {
    if (fds.empty() || !batch || batch > MAX_BATCH || slot_bytes < 64 || slot_bytes > 65'536 || gather_us < 0 ||
        gather_us > MAX_GATHER_US)
      throw std::invalid_argument("sockets, 1 to 4096 packets of 64 to 65536 bytes, gathered for up to 0.1 s");
    for (int fd : fds) {
      int on = 1;
      setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
      setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
      polls_.push_back({fd, POLLIN, 0});
    }
    kernel_.resize(fds.size());
    for (nb::handle each : xdp) {
      Xsk& owner = nb::cast<Xsk&>(each);
      if (!owner.socket()) throw std::invalid_argument("an AF_XDP socket that is closed");
      xdp_.push_back(&owner);
      polls_.push_back({owner.socket()->fd(), POLLIN, 0});
    }
    memory_.resize(size_t(batch) * slot_bytes);
    messages_.resize(batch);
    vectors_.resize(batch);
    names_.resize(batch);
    controls_.resize(size_t(batch) * CONTROL_BYTES);
    accepted_.reserve(batch);
    for (unsigned i = 0; i < batch; ++i) {
      vectors_[i] = {memory_.data() + size_t(i) * slot_bytes, slot_bytes};
      make_ready(i);
    }
  }

  void admit_ssrc(uint64_t flow, uint32_t ssrc, const nb::bytes& source, double per_s, double burst) {
    if (!source.size()) return flows_.admit_ssrc(flow, ssrc, nullptr, per_s, burst);
    Key key = read_key(source);
    flows_.admit_ssrc(flow, ssrc, &key, per_s, burst);
  }
  void admit_source(uint64_t flow, const nb::bytes& source, double per_s, double burst) {
    flows_.admit_source(flow, read_key(source), per_s, burst);
  }
  void admit_rtcp(uint64_t flow, double per_s, double burst, double source_per_s, double source_burst) {
    flows_.admit_rtcp(flow, per_s, burst, source_per_s, source_burst);
  }
  void latch(uint64_t flow, const nb::bytes& source, uint32_t ssrc) { flows_.latch(flow, read_key(source), ssrc); }
  void forget(uint64_t flow) { flows_.forget(flow); }
  uint64_t over_rate(uint64_t flow) { return flows_.over_rate(flow); }

  nb::object receive(int timeout_ms) {
    if (closed_) throw std::runtime_error("the receiver is closed");
    accepted_.clear();
    int failed = 0;
    {
      nb::gil_scoped_release release;
      failed = fill(timeout_ms);
    }
    if (failed) raise_errno(failed, "packets cannot be received");
    nb::object list = nb::steal(PyList_New(Py_ssize_t(accepted_.size())));
    if (!list.is_valid()) throw nb::python_error();
    for (size_t i = 0; i < accepted_.size(); ++i) {
      const Accepted& each = accepted_[i];
      PyObject* row = PyTuple_New(4);
      if (!row) throw nb::python_error();
      PyList_SET_ITEM(list.ptr(), Py_ssize_t(i), row);
      PyTuple_SET_ITEM(row, 0, PyLong_FromUnsignedLongLong(each.flow));
      PyTuple_SET_ITEM(row, 1, PyBytes_FromStringAndSize(each.source.data(), KEY_BYTES));
      PyTuple_SET_ITEM(row, 2, PyBytes_FromStringAndSize(reinterpret_cast<const char*>(each.data), Py_ssize_t(each.bytes)));
      PyTuple_SET_ITEM(row, 3, PyFloat_FromDouble(double(each.arrival_ns) * 1e-9));
      for (int k = 0; k < 4; ++k)
        if (!PyTuple_GET_ITEM(row, k)) throw nb::python_error();
    }
    for (Xsk* each : xdp_) each->socket()->give_back();
    return list;
  }

  nb::dict counts() {
    std::lock_guard lock(flows_.mutex);
    const Counts& counted = flows_.counts;
    nb::dict counts;
    counts["received"] = counted.received;
    counts["unknown_source"] = counted.unknown_source;
    counts["over_rate"] = counted.over_rate;
    counts["truncated"] = counted.truncated;
    counts["not_rtp"] = counted.not_rtp;
    counts["checksum"] = counted.checksum;
    uint64_t kernel = 0;
    for (uint32_t each : kernel_) kernel += each;
    for (Xsk* each : xdp_) {
      if (!each->socket()) continue;
      const xdp::Statistics found = each->socket()->statistics();
      kernel += found.ring_full + std::max(found.dropped, found.fill_empty);  // copies count one drop twice
    }
    counts["kernel"] = kernel;
    return counts;
  }

  void close() {
    closed_ = true;
    for (Xsk* each : xdp_) each->close();
  }

 private:
  // Receives a batch; returns an errno, or 0. While packets come, one sleep for each batch takes the place of a wake-up
  // for each packet; the first after a pause is not held back.
  int fill(int timeout_ms) {
    if (moving_ && gather_us_ && !full_ && waiting() < batch_ / 2) {
      timespec pause{0, gather_us_ * 1'000l};
      nanosleep(&pause, nullptr);
    }
    for (Xsk* each : xdp_)
      if (each->socket()->busy_poll()) each->socket()->wake();
    unsigned used = 0;
    int failed = take_all(used);
    if (!failed && !used) {
      const int ready = poll(polls_.data(), polls_.size(), timeout_ms);
      if (ready < 0) failed = errno == EINTR ? 0 : errno;
      if (ready > 0) failed = take_all(used);
    }
    moving_ = used > 0;
    full_ = used >= batch_ / 2;
    return failed;
  }

  // Takes what is there, and does not wait.
  int take_all(unsigned& used) {
    if (waiting()) {
      const int64_t now = now_ns(CLOCK_MONOTONIC);
      std::lock_guard lock(flows_.mutex);
      const unsigned most = batch_ - batch_ / 4;  // the rest is for the kernel's socket
      for (size_t i = 0; i < xdp_.size() && used < most; ++i)
        used += xdp_[(first_ + i) % xdp_.size()]->socket()->take(most - used, flows_, accepted_, now);
      ++first_;
    }
    for (size_t index = 0; index < kernel_.size() && used < batch_; ++index) {
      int got = recvmmsg(polls_[index].fd, messages_.data() + used, batch_ - used, MSG_DONTWAIT, nullptr);
      if (got < 0) {
        if (errno == EAGAIN || errno == EINTR || errno == ECONNREFUSED) continue;
        return errno;
      }
      const int64_t now = now_ns(CLOCK_MONOTONIC), real = now_ns(CLOCK_REALTIME);
      std::lock_guard lock(flows_.mutex);
      for (unsigned i = used; i < used + unsigned(got); ++i) {
        take(index, i, now, real);
        make_ready(i);
      }
      used += unsigned(got);
    }
    return 0;
  }

  // Header of a slot as recvmmsg wants it: what a call has changed is set again.
  void make_ready(unsigned i) {
    msghdr& header = messages_[i].msg_hdr;
    header = {};
    header.msg_name = &names_[i];
    header.msg_namelen = sizeof names_[i];
    header.msg_iov = &vectors_[i];
    header.msg_iovlen = 1;
    header.msg_control = &controls_[size_t(i) * CONTROL_BYTES];
    header.msg_controllen = CONTROL_BYTES;
  }

  unsigned waiting() const {
    unsigned found = 0;
    for (Xsk* each : xdp_) found += each->socket()->waiting();
    return found;
  }

  void take(size_t index, unsigned i, int64_t monotonic, int64_t real) {
    msghdr& header = messages_[i].msg_hdr;
    ++flows_.counts.received;
    int64_t arrival = monotonic;
    for (cmsghdr* part = CMSG_FIRSTHDR(&header); part; part = CMSG_NXTHDR(&header, part)) {
      if (part->cmsg_level != SOL_SOCKET) continue;
      if (part->cmsg_type == SCM_TIMESTAMPNS) {
        timespec at;
        std::memcpy(&at, CMSG_DATA(part), sizeof at);
        int64_t age = real - (int64_t(at.tv_sec) * 1'000'000'000 + at.tv_nsec);
        arrival = monotonic - std::clamp<int64_t>(age, 0, 1'000'000'000);
      } else if (part->cmsg_type == SO_RXQ_OVFL) {
        std::memcpy(&kernel_[index], CMSG_DATA(part), sizeof kernel_[index]);
      }
    }
    if (header.msg_flags & MSG_TRUNC) { ++flows_.counts.truncated; return; }
    Key source;
    write_key(names_[i], source);
    flows_.sort(static_cast<const uint8_t*>(vectors_[i].iov_base), messages_[i].msg_len, source, arrival, monotonic, accepted_);
  }

  unsigned batch_, slot_bytes_;
  int gather_us_;
  bool closed_ = false;
  bool moving_ = false, full_ = false;  // whether the last batch had packets, and half of what it may have
  nb::list owners_;
  std::vector<Xsk*> xdp_;
  size_t first_ = 0;  // queue that is read first: each in its turn
  std::vector<pollfd> polls_;
  std::vector<uint32_t> kernel_;
  std::vector<uint8_t> memory_;
  std::vector<mmsghdr> messages_;
  std::vector<iovec> vectors_;
  std::vector<sockaddr_storage> names_;
  std::vector<char> controls_;
  std::vector<Accepted> accepted_;
  FlowTable flows_;
};

// Parser of RTP headers, that makes records of a subclass of tuple, or answers with a reason.
class RtpParser {
 public:
  RtpParser(nb::object record, nb::object not_rtp, nb::object malformed, nb::object rtcp)
      : record_(std::move(record)), not_rtp_(std::move(not_rtp)), malformed_(std::move(malformed)), rtcp_(std::move(rtcp)) {
    if (!PyType_Check(record_.ptr()) || !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(record_.ptr()), &PyTuple_Type))
      throw std::invalid_argument("records are of a subclass of tuple");
  }

  nb::object parse(nb::handle datagram) const {
    Py_buffer view;
    if (PyObject_GetBuffer(datagram.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
    struct Release { Py_buffer* view; ~Release() { PyBuffer_Release(view); } } release{&view};
    const auto* data = static_cast<const uint8_t*>(view.buf);
    const size_t bytes = size_t(view.len);
    if (bytes < 12 || data[0] >> 6 != 2) return not_rtp_;
    const unsigned kind = data[1] & 0x7f;
    if (kind >= 64 && kind < 96) return rtcp_;
    size_t start = 12 + 4 * size_t(data[0] & 0x0f), end = bytes;
    if (data[0] & 0x10) {
      if (start + 4 > bytes) return malformed_;
      start += 4 + 4 * (size_t(data[start + 2]) << 8 | data[start + 3]);
    }
    if (data[0] & 0x20) {
      const size_t padding = data[bytes - 1];
      if (!padding || padding > end) return malformed_;
      end -= padding;
    }
    if (start > end) return malformed_;
    auto word = [&](size_t at) {
      return uint32_t(data[at]) << 24 | uint32_t(data[at + 1]) << 16 | uint32_t(data[at + 2]) << 8 | data[at + 3];
    };
    auto* type = reinterpret_cast<PyTypeObject*>(record_.ptr());
    nb::object record = nb::steal(type->tp_alloc(type, 6));
    if (!record.is_valid()) throw nb::python_error();
    PyObject* fields[6] = {
        PyLong_FromLong(long(kind)),
        PyBool_FromLong(data[1] >> 7),
        PyLong_FromLong(long(data[2]) << 8 | data[3]),
        PyLong_FromUnsignedLong(word(4)),
        PyLong_FromUnsignedLong(word(8)),
        PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data + start), Py_ssize_t(end - start)),
    };
    bool whole = true;
    for (int i = 0; i < 6; ++i) {
      whole = whole && fields[i];
      PyTuple_SET_ITEM(record.ptr(), i, fields[i]);
    }
    if (!whole) throw nb::python_error();
    return record;
  }

 private:
  nb::object record_, not_rtp_, malformed_, rtcp_;
};

}  // namespace

NB_MODULE(_packets, m) {
  m.doc() = "Datagrams in batches, by recvmmsg and AF_XDP. packets_reference.py receives them one by one.";
  m.attr("INTERFACE") = INTERFACE;
  nb::class_<Xsk>(m, "XdpSocket")
      .def(nb::init<nb::handle, uint32_t, uint32_t, uint32_t, uint32_t, bool, int>(), "memory"_a, nb::kw_only(), "frame_bytes"_a,
           "ring"_a, "interface"_a, "queue"_a, "zero_copy"_a, "busy_poll_us"_a = 0)
      .def("fileno", [](Xsk& self) { return self.socket() ? self.socket()->fd() : -1; })
      .def("close", &Xsk::close, "Close the socket, and let go of the memory.");
  nb::class_<Receiver>(m, "PacketReceiver")
      .def(nb::init<std::vector<int>, nb::list, unsigned, unsigned, int>(), "fds"_a, "xdp"_a = nb::list(), nb::kw_only(),
           "batch"_a = 64, "slot_bytes"_a = 2048, "gather_us"_a = 0)
      .def("admit_ssrc", &Receiver::admit_ssrc, "flow"_a, "ssrc"_a, "source"_a, "per_s"_a, "burst"_a,
           "Expect an SSRC, of one source or, for no bytes, of any.")
      .def("admit_source", &Receiver::admit_source, "flow"_a, "source"_a, "per_s"_a, "burst"_a,
           "Expect a source; one of port 0 is any port of its address.")
      .def("admit_rtcp", &Receiver::admit_rtcp, "flow"_a, "per_s"_a, "burst"_a, "source_per_s"_a, "source_burst"_a,
           "Expect RTCP from anywhere: so much in all, and so much of an address.")
      .def("latch", &Receiver::latch, "flow"_a, "source"_a, "ssrc"_a, "Expect the flow from this source only, with this SSRC too.")
      .def("forget", &Receiver::forget, "flow"_a, "Expect the flow no more.")
      .def("over_rate", &Receiver::over_rate, "flow"_a, "Datagrams of a flow that came too fast since it was admitted.")
      .def("receive", &Receiver::receive, "timeout_ms"_a,
           "(flow, source, payload, arrival) of datagrams that are there, or come within this time.")
      .def("close", &Receiver::close, "Receive no more, and close the AF_XDP sockets. The others stay their owner's.")
      .def("counts", &Receiver::counts, "Datagrams received, and dropped by reason.");
  nb::class_<RtpParser>(m, "RtpParser")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object>(), "record"_a, "not_rtp"_a, "malformed"_a, "rtcp"_a)
      .def("__call__", &RtpParser::parse, "datagram"_a);
  m.def("create_map", [](uint32_t type, uint32_t key_bytes, uint32_t value_bytes, uint32_t entries) {
    return checked([&] { return bpf::create_map(type, key_bytes, value_bytes, entries); });
  }, "type"_a, "key_bytes"_a, "value_bytes"_a, "entries"_a, "Descriptor of a new BPF map.");
  m.def("update_map", [](int map, const nb::bytes& key, const nb::bytes& value) {
    checked([&] { bpf::update_map(map, key.c_str(), value.c_str()); return 0; });
  }, "map"_a, "key"_a, "value"_a, "Set an entry; the lengths are those the map was created with.");
  m.def("load_program", [](const nb::bytes& code, const char* license) {
    return checked([&] { return bpf::load_program(std::string(code.c_str(), code.size()), license); });
  }, "code"_a, "license"_a, "Descriptor of an XDP program, that the kernel has verified.");
  m.def("attach_program", [](int program, uint32_t interface, uint32_t flags) {
    return checked([&] { return bpf::attach(program, interface, flags); });
  }, "program"_a, "interface"_a, "flags"_a, "Descriptor of a link: the program runs until it is closed.");
}
#else
NB_MODULE(_packets, m) { m.doc() = "recvmmsg is Linux's: packets_reference.py does the same one by one."; }
#endif
