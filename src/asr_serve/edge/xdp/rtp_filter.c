// XDP program that hands UDP datagrams of listed ports and addresses to AF_XDP sockets, one for each queue of the
// network card, and leaves everything else to the kernel: other ports and addresses, fragments, VLAN tags, IPv4 options,
// IPv6 extension headers, lengths that do not fit, queues without a socket. What the kernel gets still reaches the
// ordinary UDP socket beside, so a packet that is not understood here is slower, never lost.
//
// It includes nothing: the types below are the kernel's ABI. build_filter.py builds it, filter_object.py reads the result.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SECTION(name) __attribute__((section(name), used))
#define BIG16(x) ((u16)((x) >> 8 | ((x) & 0xff) << 8))

enum { PASS = 2 };  // XDP_PASS
enum { HASH = 1, XSKMAP = 17 };
enum { MAX_BYTES = 1600 };  // of a frame of UMEM; longer is no RTP

struct xdp_md {
  u32 data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex;
};

// What the loader reads: BPF_MAP_CREATE's first fields.
struct map {
  u32 type, key_bytes, value_bytes, entries;
};

struct map SECTION("maps") ports = {HASH, 2, 4, 64};         // destination ports, in network order
struct map SECTION("maps") addresses = {HASH, 16, 4, 256};   // destination addresses; IPv4 mapped into IPv6
struct map SECTION("maps") sockets = {XSKMAP, 4, 4, 64};     // the socket of each queue

static void *(*lookup)(void *map, const void *key) = (void *)1;                  // bpf_map_lookup_elem
static u64 (*monotonic_ns)(void) = (void *)5;                                    // bpf_ktime_get_ns
static long (*redirect)(void *map, u64 key, u64 otherwise) = (void *)51;         // bpf_redirect_map
static long (*adjust_meta)(struct xdp_md *context, int bytes) = (void *)54;      // bpf_xdp_adjust_meta

struct ethernet {
  u8 to[6], from[6];
  u16 type;
} __attribute__((packed));

struct ipv4 {
  u8 version_words, service;
  u16 bytes, id, fragment;
  u8 hops, protocol;
  u16 checksum;
  u32 from, to;
} __attribute__((packed));

struct ipv6 {
  u32 version_class_flow;
  u16 bytes;
  u8 protocol, hops;
  u8 from[16];
  u32 to[4];
} __attribute__((packed));

struct udp {
  u16 from, to, bytes, checksum;
} __attribute__((packed));

// Time of arrival, in front of the frame. The mark tells it from what lay there before.
struct arrival {
  u64 ns, mark;
};
#define MARK 0x6173722d73657276ull

SECTION("xdp") int filter(struct xdp_md *context) {
  void *data = (void *)(u64)context->data, *end = (void *)(u64)context->data_end;
  struct ethernet *ethernet = data;
  if ((void *)(ethernet + 1) > end || (u64)end - (u64)data > MAX_BYTES) return PASS;
  u32 to[4];
  struct udp *udp;
  u32 datagram_bytes;
  if (ethernet->type == BIG16(0x0800)) {
    struct ipv4 *ip = (void *)(ethernet + 1);
    udp = (void *)(ip + 1);
    if ((void *)(udp + 1) > end) return PASS;
    if (ip->version_words != 0x45 || ip->protocol != 17 || ip->fragment & BIG16(0x3fff)) return PASS;
    datagram_bytes = BIG16(ip->bytes) - sizeof *ip;
    to[0] = to[1] = 0, to[2] = 0xffff0000u, to[3] = ip->to;
  } else if (ethernet->type == BIG16(0x86dd)) {
    struct ipv6 *ip = (void *)(ethernet + 1);
    udp = (void *)(ip + 1);
    if ((void *)(udp + 1) > end) return PASS;
    if (ip->protocol != 17 || (ip->version_class_flow & 0xf0) != 0x60) return PASS;
    datagram_bytes = BIG16(ip->bytes);
    to[0] = ip->to[0], to[1] = ip->to[1], to[2] = ip->to[2], to[3] = ip->to[3];
  } else {
    return PASS;
  }
  if (datagram_bytes < sizeof *udp || datagram_bytes != BIG16(udp->bytes) || datagram_bytes > (u64)end - (u64)udp) return PASS;
  u16 port = udp->to;
  if (!lookup(&ports, &port) || !lookup(&addresses, to)) return PASS;
  if (!adjust_meta(context, -(int)sizeof(struct arrival))) {
    struct arrival *arrival = (void *)(u64)context->data_meta;
    if ((void *)(arrival + 1) <= (void *)(u64)context->data) {
      arrival->ns = monotonic_ns();
      arrival->mark = MARK;
    }
  }
  return redirect(&sockets, context->rx_queue_index, PASS);
}
