// AF_XDP socket of one queue, that only receives, and the bpf() calls that lead packets to it. The kernel's ABI is written
// out here: a wheel is built where headers are older than the kernels it runs on.
// Source: Documentation/networking/af_xdp.rst, bpf(2).
#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>
#include <vector>

#include "packet_flows.hpp"

namespace packets {

namespace xdp {

constexpr int FAMILY = 44, LEVEL = 283;  // AF_XDP, SOL_XDP
enum Option { MMAP_OFFSETS = 1, RX_RING = 2, UMEM_REG = 4, FILL_RING = 5, COMPLETION_RING = 6, STATISTICS = 7, OPTIONS = 8 };
enum BindFlag : uint16_t { COPY = 2, ZEROCOPY = 4, USE_NEED_WAKEUP = 8 };
constexpr uint32_t NEED_WAKEUP = 1;
constexpr off_t RX_OFFSET = 0, FILL_OFFSET = 0x100000000;

struct UmemRegistration { uint64_t address, bytes; uint32_t chunk_bytes, headroom, flags; };
struct RingOffsets { uint64_t producer, consumer, descriptors, flags; };
struct Offsets { RingOffsets rx, tx, fill, completion; };
struct Descriptor { uint64_t address; uint32_t bytes, options; };
struct Address { uint16_t family, flags; uint32_t interface, queue, shared_fd; };
struct Statistics { uint64_t dropped, invalid, tx_invalid, ring_full, fill_empty, tx_empty; };
struct Arrival { uint64_t ns, mark; };
constexpr uint64_t MARK = 0x6173722d73657276ull;  // as in rtp_filter.c

[[noreturn]] inline void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace xdp

// UDP datagram within a frame that the filter took: checked again, as the memory is the network's.
struct Datagram {
  const uint8_t* data;
  uint32_t bytes;
  Key source;
};

inline uint64_t add_words(const uint8_t* data, size_t bytes, uint64_t sum) {
  while (bytes >= 4) {
    uint32_t word;
    std::memcpy(&word, data, 4);
    sum += word;
    data += 4, bytes -= 4;
  }
  uint32_t rest = 0;
  std::memcpy(&rest, data, bytes);
  return sum + rest;
}
inline uint16_t folded(uint64_t sum) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return uint16_t(sum);
}

enum class Frame { DATAGRAM, MALFORMED, CHECKSUM };

inline Frame parse_frame(const uint8_t* frame, size_t bytes, Datagram& to) {
  auto word = [](const uint8_t* at) { return uint32_t(at[0]) << 8 | at[1]; };
  if (bytes < 14) return Frame::MALFORMED;
  const uint32_t type = word(frame + 12);
  const uint8_t* ip = frame + 14;
  const uint8_t* udp;
  uint64_t sum;
  if (type == 0x0800 && bytes >= 14 + 20 + 8 && ip[0] == 0x45) {
    if (folded(add_words(ip, 20, 0)) != 0xffff) return Frame::CHECKSUM;
    udp = ip + 20;
    std::memset(to.source.data(), 0, 10);
    std::memset(to.source.data() + 10, 0xff, 2);
    std::memcpy(to.source.data() + 12, ip + 12, 4);
    sum = add_words(ip + 12, 8, 0);
  } else if (type == 0x86dd && bytes >= 14 + 40 + 8) {
    udp = ip + 40;
    std::memcpy(to.source.data(), ip + 8, 16);
    sum = add_words(ip + 8, 32, 0);
  } else {
    return Frame::MALFORMED;
  }
  const uint32_t length = word(udp + 4);
  if (length < 8 || length > bytes - size_t(udp - frame)) return Frame::MALFORMED;
  std::memcpy(to.source.data() + 16, udp, 2);
  to.data = udp + 8;
  to.bytes = length - 8;
  uint16_t came;
  std::memcpy(&came, udp + 6, 2);
  if (!came) return type == 0x0800 ? Frame::DATAGRAM : Frame::CHECKSUM;  // IPv6 has no datagrams without one
  const uint8_t pseudo[4] = {0, 17, udp[4], udp[5]};
  sum = add_words(pseudo, 4, sum);
  if (folded(add_words(udp, length, sum)) == 0xffff) return Frame::DATAGRAM;
  // On a virtual link the sender leaves the sum to hardware that is not there: the field holds that of the pseudo-header.
  return came == folded(sum) ? Frame::DATAGRAM : Frame::CHECKSUM;
}

class XdpSocket {
 public:
  // `memory`: UMEM, frames of `frame_bytes`, whose number is a power of two.
  XdpSocket(uint8_t* memory, size_t memory_bytes, uint32_t frame_bytes, uint32_t ring, uint32_t interface, uint32_t queue,
            bool zero_copy, int busy_poll_us)
      : memory_(memory), memory_bytes_(memory_bytes), frame_bytes_(frame_bytes), frames_(uint32_t(memory_bytes / frame_bytes)), ring_(ring) {
    try {
      open(interface, queue, zero_copy, busy_poll_us);
    } catch (...) {
      close();
      throw;
    }
  }
  XdpSocket(const XdpSocket&) = delete;
  ~XdpSocket() { close(); }

  int fd() const { return fd_; }
  bool zero_copy() const { return zero_copy_; }
  uint32_t waiting() const { return fd_ < 0 ? 0 : __atomic_load_n(rx_producer_, __ATOMIC_ACQUIRE) - *rx_consumer_; }

  xdp::Statistics statistics() const {
    xdp::Statistics found{};
    socklen_t bytes = sizeof found;
    if (fd_ >= 0) getsockopt(fd_, xdp::LEVEL, xdp::STATISTICS, &found, &bytes);
    return found;
  }

  // Sorts up to `most` frames that wait; returns how many. `give_back` must follow, when their bytes were copied.
  unsigned take(unsigned most, FlowTable& flows, std::vector<Accepted>& to, int64_t now) {
    const unsigned count = std::min(most, waiting());
    for (unsigned i = 0; i < count; ++i) {
      const xdp::Descriptor& each = descriptors_[(*rx_consumer_ + i) & (ring_ - 1)];
      returned_.push_back(each.address & ~uint64_t(frame_bytes_ - 1));
      ++flows.counts.received;
      if (each.address + each.bytes > memory_bytes_) { ++flows.counts.not_rtp; continue; }  // never, from a sound kernel
      uint8_t* frame = memory_ + each.address;
      int64_t arrival = now;
      if ((each.address & (frame_bytes_ - 1)) >= sizeof(xdp::Arrival)) {
        xdp::Arrival stamp;
        std::memcpy(&stamp, frame - sizeof stamp, sizeof stamp);
        if (stamp.mark == xdp::MARK) {
          arrival = std::clamp(int64_t(stamp.ns), now - 1'000'000'000, now);
          std::memset(frame - sizeof stamp, 0, sizeof stamp);
        }
      }
      Datagram datagram;
      switch (parse_frame(frame, each.bytes, datagram)) {
        case Frame::DATAGRAM: flows.sort(datagram.data, datagram.bytes, datagram.source, arrival, now, to); break;
        case Frame::MALFORMED: ++flows.counts.not_rtp; break;
        case Frame::CHECKSUM: ++flows.counts.checksum; break;
      }
    }
    __atomic_store_n(rx_consumer_, *rx_consumer_ + count, __ATOMIC_RELEASE);
    return count;
  }

  // Frames that were taken, to be filled again.
  void give_back() {
    if (fd_ < 0 || returned_.empty()) return;
    const uint32_t at = *fill_producer_;
    for (size_t i = 0; i < returned_.size(); ++i) fill_[(at + i) & (frames_ - 1)] = returned_[i];
    __atomic_store_n(fill_producer_, at + uint32_t(returned_.size()), __ATOMIC_RELEASE);
    returned_.clear();
    if (busy_poll_ || __atomic_load_n(fill_flags_, __ATOMIC_ACQUIRE) & xdp::NEED_WAKEUP) wake();
  }

  void wake() { recvfrom(fd_, nullptr, 0, MSG_DONTWAIT, nullptr, nullptr); }
  bool busy_poll() const { return busy_poll_; }

  void close() {
    if (rx_map_ != MAP_FAILED) munmap(rx_map_, rx_bytes_);
    if (fill_map_ != MAP_FAILED) munmap(fill_map_, fill_bytes_);
    if (fd_ >= 0) ::close(fd_);
    rx_map_ = fill_map_ = MAP_FAILED;
    fd_ = -1;
  }

 private:
  void set(int option, const void* value, socklen_t bytes, const char* what) {
    if (setsockopt(fd_, xdp::LEVEL, option, value, bytes)) xdp::fail(what);
  }

  void open(uint32_t interface, uint32_t queue, bool zero_copy, int busy_poll_us) {
    fd_ = socket(xdp::FAMILY, SOCK_RAW | SOCK_CLOEXEC, 0);
    if (fd_ < 0) xdp::fail("socket(AF_XDP)");
    xdp::UmemRegistration registration{uint64_t(memory_), memory_bytes_, frame_bytes_, 0, 0};
    set(xdp::UMEM_REG, &registration, sizeof registration, "UMEM");
    set(xdp::FILL_RING, &frames_, sizeof frames_, "fill ring");
    set(xdp::COMPLETION_RING, &ring_, sizeof ring_, "completion ring");
    set(xdp::RX_RING, &ring_, sizeof ring_, "receive ring");
    xdp::Offsets offsets{};
    socklen_t bytes = sizeof offsets;
    if (getsockopt(fd_, xdp::LEVEL, xdp::MMAP_OFFSETS, &offsets, &bytes)) xdp::fail("offsets of the rings");
    if (bytes != sizeof offsets) { errno = EPROTO; xdp::fail("offsets of the rings, of a kernel before 5.4"); }
    rx_bytes_ = offsets.rx.descriptors + ring_ * sizeof(xdp::Descriptor);
    rx_map_ = mmap(nullptr, rx_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, xdp::RX_OFFSET);
    if (rx_map_ == MAP_FAILED) xdp::fail("receive ring");
    fill_bytes_ = offsets.fill.descriptors + frames_ * sizeof(uint64_t);
    fill_map_ = mmap(nullptr, fill_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, xdp::FILL_OFFSET);
    if (fill_map_ == MAP_FAILED) xdp::fail("fill ring");
    auto* rx = static_cast<uint8_t*>(rx_map_);
    rx_producer_ = reinterpret_cast<uint32_t*>(rx + offsets.rx.producer);
    rx_consumer_ = reinterpret_cast<uint32_t*>(rx + offsets.rx.consumer);
    descriptors_ = reinterpret_cast<xdp::Descriptor*>(rx + offsets.rx.descriptors);
    auto* fill = static_cast<uint8_t*>(fill_map_);
    fill_producer_ = reinterpret_cast<uint32_t*>(fill + offsets.fill.producer);
    fill_flags_ = reinterpret_cast<uint32_t*>(fill + offsets.fill.flags);
    fill_ = reinterpret_cast<uint64_t*>(fill + offsets.fill.descriptors);
    for (uint32_t i = 0; i < frames_; ++i) fill_[i] = uint64_t(i) * frame_bytes_;
    __atomic_store_n(fill_producer_, frames_, __ATOMIC_RELEASE);
    if (busy_poll_us > 0) {
      const int on = 1, budget = 64;  // SO_PREFER_BUSY_POLL, SO_BUSY_POLL, SO_BUSY_POLL_BUDGET
      if (setsockopt(fd_, SOL_SOCKET, 69, &on, sizeof on) || setsockopt(fd_, SOL_SOCKET, 46, &busy_poll_us, sizeof busy_poll_us) ||
          setsockopt(fd_, SOL_SOCKET, 70, &budget, sizeof budget))
        xdp::fail("busy poll");
      busy_poll_ = true;
    }
    xdp::Address address{uint16_t(xdp::FAMILY), uint16_t((zero_copy ? xdp::ZEROCOPY : xdp::COPY) | xdp::USE_NEED_WAKEUP), interface,
                         queue, 0};
    if (bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address)) xdp::fail("bind");
    zero_copy_ = zero_copy;
    returned_.reserve(ring_);
  }

  uint8_t* memory_;
  size_t memory_bytes_;
  uint32_t frame_bytes_, frames_, ring_;
  int fd_ = -1;
  bool zero_copy_ = false, busy_poll_ = false;
  void *rx_map_ = MAP_FAILED, *fill_map_ = MAP_FAILED;
  size_t rx_bytes_ = 0, fill_bytes_ = 0;
  uint32_t *rx_producer_ = nullptr, *rx_consumer_ = nullptr, *fill_producer_ = nullptr, *fill_flags_ = nullptr;
  xdp::Descriptor* descriptors_ = nullptr;
  uint64_t* fill_ = nullptr;
  std::vector<uint64_t> returned_;
};

namespace bpf {

enum Command { MAP_CREATE = 0, MAP_UPDATE = 2, PROGRAM_LOAD = 5, LINK_CREATE = 28 };

struct MapCreate { uint32_t type, key_bytes, value_bytes, entries, flags, inner, node; char name[16]; };
struct MapUpdate { uint32_t map, padding; uint64_t key, value, flags; };
struct ProgramLoad {
  uint32_t type, instructions; uint64_t code, license; uint32_t log_level, log_bytes; uint64_t log;
  uint32_t kernel, flags; char name[16]; uint32_t interface, attach_type;
};
struct LinkCreate { uint32_t program, interface, attach_type, flags; };
constexpr uint32_t TYPE_XDP = 6, ATTACH_XDP = 37, LOG_BYTES = 64 << 10;

template <typename Attributes>
int call(Command command, Attributes& attributes, const char* what) {
  int result = int(syscall(SYS_bpf, command, &attributes, sizeof attributes));
  if (result < 0) xdp::fail(what);
  return result;
}

inline int create_map(uint32_t type, uint32_t key_bytes, uint32_t value_bytes, uint32_t entries) {
  MapCreate attributes{type, key_bytes, value_bytes, entries, 0, 0, 0, "asr_serve"};
  return call(MAP_CREATE, attributes, "a map");
}

inline void update_map(int map, const void* key, const void* value) {
  MapUpdate attributes{uint32_t(map), 0, uint64_t(key), uint64_t(value), 0};
  call(MAP_UPDATE, attributes, "an entry of a map");
}

// Loads a program of 8-byte instructions. Where the verifier refuses, it is asked once more for its words.
inline int load_program(const std::string& code, const char* license) {
  ProgramLoad attributes{};
  attributes.type = TYPE_XDP;
  attributes.instructions = uint32_t(code.size() / 8);
  attributes.code = uint64_t(code.data());
  attributes.license = uint64_t(license);
  attributes.attach_type = ATTACH_XDP;
  std::strcpy(attributes.name, "rtp_filter");
  int program = int(syscall(SYS_bpf, PROGRAM_LOAD, &attributes, sizeof attributes));
  if (program >= 0) return program;
  const int number = errno;
  if (number != EINVAL && number != EACCES) xdp::fail("the program");
  std::string log(LOG_BYTES, '\0');
  attributes.log_level = 1;
  attributes.log_bytes = LOG_BYTES;
  attributes.log = uint64_t(log.data());
  program = int(syscall(SYS_bpf, PROGRAM_LOAD, &attributes, sizeof attributes));
  if (program >= 0) return program;
  throw std::system_error(number, std::generic_category(), "the program: " + std::string(log.c_str()));
}

// Attaches a program for as long as the descriptor is open: a process that is killed leaves nothing behind.
inline int attach(int program, uint32_t interface, uint32_t flags) {
  LinkCreate attributes{uint32_t(program), interface, ATTACH_XDP, flags};
  return call(LINK_CREATE, attributes, "the link");
}

}  // namespace bpf

}  // namespace packets
