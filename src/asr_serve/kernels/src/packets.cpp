// Datagrams in batches: recvmmsg into slots that are lent, with a table of expected flows in front, so that a flood of
// others costs neither Python nor the interpreter's lock. Source: recvmmsg(2), socket(7), RFC 3550, section 5.1.
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
#include <unordered_map>

#ifndef SO_RXQ_OVFL
#define SO_RXQ_OVFL 40
#endif

namespace {

constexpr size_t KEY_BYTES = 18;  // an IPv6 address, or IPv4 mapped into one, and a port in network order
constexpr size_t CONTROL_BYTES = 128;
constexpr unsigned MAX_BATCH = 1024;
constexpr unsigned MAX_BATCHES = 64;

using Key = std::string;

int64_t now_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

struct Flow {
  Key source;  // empty: any, until it is latched
  double per_ns, burst, tokens;
  int64_t last_ns;
};

struct Counts {
  uint64_t received = 0, unknown_source = 0, over_rate = 0, truncated = 0, not_rtp = 0, kernel = 0;
};

void write_key(const sockaddr_storage& from, char* key) {
  if (from.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(from);
    std::memset(key, 0, 10);
    std::memset(key + 10, 0xff, 2);
    std::memcpy(key + 12, &v4.sin_addr, 4);
    std::memcpy(key + 16, &v4.sin_port, 2);
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(from);
    std::memcpy(key, &v6.sin6_addr, 16);
    std::memcpy(key + 16, &v6.sin6_port, 2);
  }
}

struct Accepted {
  uint64_t flow;
  char key[KEY_BYTES];
  uint32_t slot, bytes;
  double arrival_s;
};

class Receiver;

class Loan {
 public:
  Loan(nb::object owner, Receiver* receiver, unsigned group, nb::list datagrams)
      : owner_(std::move(owner)), receiver_(receiver), group_(group), datagrams_(std::move(datagrams)) {}
  nb::list datagrams() const { return datagrams_; }
  void release();

 private:
  nb::object owner_;
  Receiver* receiver_;
  unsigned group_;
  nb::list datagrams_;
};

class Receiver {
 public:
  Receiver(std::vector<int> fds, unsigned batch, unsigned batches, unsigned slot_bytes)
      : batch_(batch), slot_bytes_(slot_bytes) {
    if (fds.empty() || !batch || batch > MAX_BATCH || !batches || batches > MAX_BATCHES || slot_bytes < 64 ||
        slot_bytes > 65'536)
      throw std::invalid_argument("sockets, 1 to 1024 packets in 1 to 64 batches, of 64 to 65536 bytes");
    for (int fd : fds) {
      int on = 1;
      setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
      setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof on);
      polls_.push_back({fd, POLLIN, 0});
    }
    kernel_.resize(fds.size());
    free_ = batches == 64 ? ~uint64_t(0) : (uint64_t(1) << batches) - 1;
    PyObject* bytes = PyByteArray_FromStringAndSize(nullptr, Py_ssize_t(batch) * batches * slot_bytes);
    if (!bytes) throw nb::python_error();
    memory_ = nb::steal(bytes);
    data_ = PyByteArray_AS_STRING(bytes);
    view_ = nb::steal(PyMemoryView_FromObject(bytes)).attr("toreadonly")();
    messages_.resize(batch);
    vectors_.resize(batch);
    names_.resize(batch);
    controls_.resize(size_t(batch) * CONTROL_BYTES);
    accepted_.reserve(batch);
  }

  void admit_ssrc(uint64_t flow, uint32_t ssrc, const nb::bytes& source, double per_s, double burst) {
    add(flow, std::string(source.c_str(), source.size()), per_s, burst);
    by_ssrc_[ssrc] = flow;
  }
  void admit_source(uint64_t flow, const nb::bytes& source, double per_s, double burst) {
    Key key(source.c_str(), source.size());
    if (key.size() != KEY_BYTES) throw std::invalid_argument("a source is 16 bytes of address and 2 of port");
    add(flow, Key(), per_s, burst);
    by_source_[key] = flow;
  }
  void latch(uint64_t flow, const nb::bytes& source) {
    Key key(source.c_str(), source.size());
    auto found = flows_.find(flow);
    if (found == flows_.end()) return;
    found->second.source = key;
    by_source_.emplace(std::move(key), flow);  // further SSRCs of the same sender, unless they are another session's
  }
  void forget(uint64_t flow) {
    flows_.erase(flow);
    std::erase_if(by_ssrc_, [&](const auto& each) { return each.second == flow; });
    std::erase_if(by_source_, [&](const auto& each) { return each.second == flow; });
  }

  nb::object receive(nb::handle self, int timeout_ms) {
    unsigned group = 0;
    while (group < MAX_BATCHES && !(free_ >> group & 1)) ++group;
    if (group == MAX_BATCHES) throw std::runtime_error("all batches are lent: release one first");
    accepted_.clear();
    int failed = 0;
    {
      nb::gil_scoped_release release;
      failed = fill(group, timeout_ms);
    }
    if (failed) {
      errno = failed;
      PyErr_SetFromErrno(PyExc_OSError);
      throw nb::python_error();
    }
    if (accepted_.empty()) return nb::none();
    nb::list datagrams;
    for (const Accepted& each : accepted_) {
      Py_ssize_t start = Py_ssize_t(each.slot) * slot_bytes_;
      datagrams.append(nb::make_tuple(each.flow, nb::bytes(each.key, KEY_BYTES),
                                      view_[nb::slice(start, start + Py_ssize_t(each.bytes))], each.arrival_s));
    }
    free_ &= ~(uint64_t(1) << group);
    return nb::cast(Loan(nb::borrow(self), this, group, std::move(datagrams)));
  }

  nb::dict counts() const {
    nb::dict counts;
    counts["received"] = counts_.received;
    counts["unknown_source"] = counts_.unknown_source;
    counts["over_rate"] = counts_.over_rate;
    counts["truncated"] = counts_.truncated;
    counts["not_rtp"] = counts_.not_rtp;
    uint64_t kernel = 0;
    for (uint32_t each : kernel_) kernel += each;
    counts["kernel"] = kernel;
    return counts;
  }

  void give_back(unsigned group) { free_ |= uint64_t(1) << group; }

 private:
  void add(uint64_t flow, Key source, double per_s, double burst) {
    flows_[flow] = Flow{std::move(source), per_s * 1e-9, burst, burst, now_ns(CLOCK_MONOTONIC)};
  }

  // Fills a group of slots; returns an errno, or 0.
  int fill(unsigned group, int timeout_ms) {
    int ready = poll(polls_.data(), polls_.size(), timeout_ms);
    if (ready < 0) return errno == EINTR ? 0 : errno;
    unsigned used = 0;
    for (size_t index = 0; index < polls_.size() && used < batch_; ++index) {
      if (!(polls_[index].revents & (POLLIN | POLLERR))) continue;
      const unsigned room = batch_ - used;
      const uint32_t first = group * batch_ + used;
      for (unsigned i = 0; i < room; ++i) {
        vectors_[i] = {data_ + size_t(first + i) * slot_bytes_, slot_bytes_};
        msghdr& header = messages_[i].msg_hdr;
        header = {};
        header.msg_name = &names_[i];
        header.msg_namelen = sizeof names_[i];
        header.msg_iov = &vectors_[i];
        header.msg_iovlen = 1;
        header.msg_control = &controls_[size_t(i) * CONTROL_BYTES];
        header.msg_controllen = CONTROL_BYTES;
      }
      int got = recvmmsg(polls_[index].fd, messages_.data(), room, MSG_DONTWAIT, nullptr);
      if (got < 0) {
        if (errno == EAGAIN || errno == EINTR || errno == ECONNREFUSED) continue;
        return errno;
      }
      const int64_t monotonic = now_ns(CLOCK_MONOTONIC), real = now_ns(CLOCK_REALTIME);
      for (int i = 0; i < got; ++i) take(index, unsigned(i), first + unsigned(i), monotonic, real);
      used += unsigned(got);
    }
    return 0;
  }

  void take(size_t index, unsigned i, uint32_t slot, int64_t monotonic, int64_t real) {
    msghdr& header = messages_[i].msg_hdr;
    ++counts_.received;
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
    const uint32_t bytes = messages_[i].msg_len;
    if (header.msg_flags & MSG_TRUNC) { ++counts_.truncated; return; }
    const auto* packet = reinterpret_cast<const uint8_t*>(data_) + size_t(slot) * slot_bytes_;
    if (bytes < 12 || packet[0] >> 6 != 2) { ++counts_.not_rtp; return; }
    Accepted accepted;
    write_key(names_[i], accepted.key);
    const uint32_t ssrc = uint32_t(packet[8]) << 24 | uint32_t(packet[9]) << 16 | uint32_t(packet[10]) << 8 | packet[11];
    auto flow = find(ssrc, accepted.key, accepted.flow);
    if (!flow) { ++counts_.unknown_source; return; }
    flow->tokens = std::min(flow->burst, flow->tokens + double(monotonic - flow->last_ns) * flow->per_ns);
    flow->last_ns = monotonic;
    if (flow->tokens < 1) { ++counts_.over_rate; return; }
    flow->tokens -= 1;
    accepted.slot = slot;
    accepted.bytes = bytes;
    accepted.arrival_s = double(arrival) * 1e-9;
    accepted_.push_back(accepted);
  }

  // The flow of an SSRC, if it is this source's; else that of the source; else that of its address.
  Flow* find(uint32_t ssrc, const char* key, uint64_t& id) {
    if (auto named = by_ssrc_.find(ssrc); named != by_ssrc_.end()) {
      id = named->second;
      Flow& flow = flows_.at(id);
      return flow.source.empty() || !std::memcmp(flow.source.data(), key, KEY_BYTES) ? &flow : nullptr;
    }
    Key exact(key, KEY_BYTES);
    auto known = by_source_.find(exact);
    if (known == by_source_.end()) {
      exact[16] = exact[17] = 0;
      known = by_source_.find(exact);
      if (known == by_source_.end()) return nullptr;
    }
    id = known->second;
    Flow& flow = flows_.at(id);
    return flow.source.empty() || !std::memcmp(flow.source.data(), key, KEY_BYTES) ? &flow : nullptr;
  }

  unsigned batch_, slot_bytes_;
  std::vector<pollfd> polls_;
  std::vector<uint32_t> kernel_;
  uint64_t free_ = 0;
  nb::object memory_, view_;
  char* data_ = nullptr;
  std::vector<mmsghdr> messages_;
  std::vector<iovec> vectors_;
  std::vector<sockaddr_storage> names_;
  std::vector<char> controls_;
  std::vector<Accepted> accepted_;
  std::unordered_map<uint64_t, Flow> flows_;
  std::unordered_map<uint32_t, uint64_t> by_ssrc_;
  std::unordered_map<Key, uint64_t> by_source_;
  Counts counts_;
};

void Loan::release() {
  if (!receiver_) return;
  receiver_->give_back(group_);
  receiver_ = nullptr;
  datagrams_ = nb::list();
}

}  // namespace

NB_MODULE(_packets, m) {
  m.doc() = "Datagrams in batches, by recvmmsg. packets_reference.py does the same one by one.";
  nb::class_<Loan>(m, "PacketLoan")
      .def_prop_ro("datagrams", &Loan::datagrams, "(flow, source, payload, arrival) of each.")
      .def("release", &Loan::release, "Give the slots back: the payloads are overwritten from now on.");
  nb::class_<Receiver>(m, "PacketReceiver")
      .def(nb::init<std::vector<int>, unsigned, unsigned, unsigned>(), "fds"_a, nb::kw_only(), "batch"_a = 64,
           "batches"_a = 4, "slot_bytes"_a = 2048)
      .def("admit_ssrc", &Receiver::admit_ssrc, "flow"_a, "ssrc"_a, "source"_a, "per_s"_a, "burst"_a,
           "Expect an SSRC, of one source or, for no bytes, of any.")
      .def("admit_source", &Receiver::admit_source, "flow"_a, "source"_a, "per_s"_a, "burst"_a,
           "Expect a source; one of port 0 is any port of its address.")
      .def("latch", &Receiver::latch, "flow"_a, "source"_a, "Expect the flow from this source only.")
      .def("forget", &Receiver::forget, "flow"_a, "Expect the flow no more.")
      .def("receive", [](nb::handle self, int timeout_ms) { return nb::cast<Receiver&>(self).receive(self, timeout_ms); },
           "timeout_ms"_a, "Datagrams that are there, or come within this time; None for none that are expected.")
      .def("close", [](Receiver&) {}, "Receive no more. The sockets stay their owner's.")
      .def("counts", &Receiver::counts, "Datagrams received, and dropped by reason.");
}
#else
NB_MODULE(_packets, m) { m.doc() = "recvmmsg is Linux's: packets_reference.py does the same one by one."; }
#endif
