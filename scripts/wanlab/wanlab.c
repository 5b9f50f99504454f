/* A small wide-area network on one Linux machine. `wan.py` builds, starts and steers this program.
 *
 * Each host is a network namespace with one TUN device; this process is the internet between them. It moves whole IPv4
 * packets and gives each its sender's uplink, its pair's delay and loss, and its receiver's downlink. Real TCP crosses it
 * unchanged, and the kernel needs no netem: TUN is enough.
 *
 *   wanlab PREFIX HOSTS MTU SEED      (as root; PREFIX is the first three numbers of all addresses)
 *
 * prints `host /proc/PID/fd/N` for each host (its namespace) and `ready`, and ends when its standard input does. The
 * namespaces have no names, so that nothing of them is left whichever way this process ends. Each line of standard
 * input is a command, answered by one line, `ok` or `error: ...`. Hosts are numbered from 0, rates are bytes a second
 * (0: no limit), times are seconds:
 *
 *   delay FROM TO DELAY JITTER     one way; jitter: the delay is drawn anew, within ± JITTER, every JITTER_PERIOD_S
 *   loss FROM TO SHARE             of the packets, each by itself
 *   cut FROM TO YES                1: nothing passes, and nobody is told; 0: it passes again
 *   rate HOST UP DOWN
 *   queue SECONDS                  how long a packet may wait for a line before it is dropped
 *   site HOST SITE                 hosts of one site (0 ...) share its line to everybody else
 *   line SITE UP DOWN
 *   counts FROM TO                 answers `ok DELIVERED LOST FULL CUT BYTES`: packets, and bytes of those delivered
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_HOSTS 64
#define MAX_PACKET 65536
#define BATCH 64
#define JITTER_PERIOD_S 0.25

/* A limited line: when each of its directions is free again. */
struct line { double up, down; int64_t up_free, down_free; };
struct host { int tun, site; struct line line; };
struct pair {
    double delay_s, jitter_s, loss, jitter_now_s;
    int64_t redraw, last_due;
    int cut;
    uint64_t delivered, lost, full, cut_off, bytes;
};
struct packet { int64_t due; uint64_t order; int from, to, size; unsigned char *bytes; };

static struct host hosts[MAX_HOSTS];
static struct line sites[MAX_HOSTS];
static struct pair pairs[MAX_HOSTS][MAX_HOSTS];
static int host_count;
static unsigned char prefix[3];
static int64_t queue_ns = 100000000;
static uint64_t random_state, packet_count;
static struct packet *heap;
static size_t heap_size, heap_room;

static void die(const char *what) {
    fprintf(stderr, "wanlab: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* splitmix64: a number in [0, 1). */
static double draw(void) {
    uint64_t z = random_state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return (double)((z ^ (z >> 31)) >> 11) / (double)(1ULL << 53);
}

/* ---------------------------------------------------------------- packets on their way, by due time */

static int before(const struct packet *a, const struct packet *b) {
    return a->due != b->due ? a->due < b->due : a->order < b->order;
}

static void push(struct packet p) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? heap_room * 2 : 4096;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap) die("memory");
    }
    size_t i = heap_size++;
    while (i && before(&p, &heap[(i - 1) / 2])) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = p;
}

static struct packet pop(void) {
    struct packet top = heap[0], last = heap[--heap_size];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= heap_size) break;
        if (child + 1 < heap_size && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[i] = heap[child];
        i = child;
    }
    if (heap_size) heap[i] = last;
    return top;
}

/* When a packet that reaches one end of a line at `at` leaves the other, or -1 where its queue is full. */
static int64_t through(int64_t *next_free, double rate, int size, int64_t at) {
    if (rate <= 0) return at;
    int64_t start = *next_free > at ? *next_free : at;
    if (start - at > queue_ns) return -1;
    return *next_free = start + (int64_t)(size / rate * 1e9);
}

static void take(int from, const unsigned char *bytes, int size, int64_t now) {
    if (size < 20 || bytes[0] >> 4 != 4 || memcmp(bytes + 16, prefix, 3)) return;
    int to = bytes[19] - 1;
    if (to < 0 || to >= host_count || to == from) return;
    struct pair *pair = &pairs[from][to];
    struct host *source = &hosts[from], *target = &hosts[to];
    if (pair->cut) { pair->cut_off++; return; }
    if (pair->loss > 0 && draw() < pair->loss) { pair->lost++; return; }
    int apart = source->site < 0 || source->site != target->site;
    int64_t at = through(&source->line.up_free, source->line.up, size, now);
    if (at >= 0 && apart && source->site >= 0)
        at = through(&sites[source->site].up_free, sites[source->site].up, size, at);
    if (at >= 0) {
        if (pair->jitter_s > 0 && now >= pair->redraw) {
            pair->jitter_now_s = (2 * draw() - 1) * pair->jitter_s;
            pair->redraw = now + (int64_t)(JITTER_PERIOD_S * 1e9);
        }
        at += (int64_t)((pair->delay_s + pair->jitter_now_s) * 1e9);
        /* A path that becomes faster does not overtake itself: TCP would take that for loss. */
        if (at < pair->last_due) at = pair->last_due;
        pair->last_due = at;
    }
    if (at >= 0 && apart && target->site >= 0)
        at = through(&sites[target->site].down_free, sites[target->site].down, size, at);
    if (at >= 0) at = through(&target->line.down_free, target->line.down, size, at);
    if (at < 0) { pair->full++; return; }
    unsigned char *copy = malloc(size);
    if (!copy) die("memory");
    memcpy(copy, bytes, size);
    push((struct packet){ at, packet_count++, from, to, size, copy });
}

static void deliver(int64_t now) {
    while (heap_size && heap[0].due <= now) {
        struct packet p = pop();
        struct pair *pair = &pairs[p.from][p.to];
        if (pair->cut) pair->cut_off++;
        else if (write(hosts[p.to].tun, p.bytes, p.size) == p.size) pair->delivered++, pair->bytes += p.size;
        else pair->full++;
        free(p.bytes);
    }
}

/* ---------------------------------------------------------------- hosts */

static void set_up(int sock, const char *name, int index, int mtu) {
    struct ifreq request = {0};
    strcpy(request.ifr_name, name);
    struct sockaddr_in *address = (struct sockaddr_in *)&request.ifr_addr;
    if (index >= 0) {
        unsigned char bytes[4] = { prefix[0], prefix[1], prefix[2], index + 1 };
        address->sin_family = AF_INET;
        memcpy(&address->sin_addr, bytes, 4);
        if (ioctl(sock, SIOCSIFADDR, &request)) die("address");
        address->sin_addr.s_addr = htonl(0xffffff00);
        if (ioctl(sock, SIOCSIFNETMASK, &request)) die("netmask");
        request.ifr_mtu = mtu;
        if (ioctl(sock, SIOCSIFMTU, &request)) die("mtu");
        request.ifr_qlen = 4000;
        if (ioctl(sock, SIOCSIFTXQLEN, &request)) die("queue length");
    }
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    if (ioctl(sock, SIOCSIFFLAGS, &request)) die("interface up");
}

static void open_host(int index, int mtu) {
    if (unshare(CLONE_NEWNET)) die("a network namespace");
    int space = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (space < 0 || tun < 0 || sock < 0) die("/dev/net/tun");
    struct ifreq request = {0};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strcpy(request.ifr_name, "wan0");
    if (ioctl(tun, TUNSETIFF, &request)) die("a TUN device");
    set_up(sock, "lo", -1, 0);
    set_up(sock, "wan0", index, mtu);
    close(sock);
    hosts[index] = (struct host){ .tun = tun, .site = -1 };
    printf("host /proc/%d/fd/%d\n", getpid(), space);
}

/* ---------------------------------------------------------------- commands */

static int host_number(int number) { return number >= 0 && number < host_count; }

static void obey(const char *text) {
    int a, b, yes;
    double x, y;
    if (sscanf(text, "delay %d %d %lf %lf", &a, &b, &x, &y) == 4 && host_number(a) && host_number(b) && x >= y && y >= 0) {
        struct pair *pair = &pairs[a][b];
        pair->delay_s = x; pair->jitter_s = y; pair->jitter_now_s = 0; pair->redraw = 0; pair->last_due = 0;
    } else if (sscanf(text, "loss %d %d %lf", &a, &b, &x) == 3 && host_number(a) && host_number(b) && x >= 0 && x <= 1) {
        pairs[a][b].loss = x;
    } else if (sscanf(text, "cut %d %d %d", &a, &b, &yes) == 3 && host_number(a) && host_number(b)) {
        pairs[a][b].cut = yes;
    } else if (sscanf(text, "rate %d %lf %lf", &a, &x, &y) == 3 && host_number(a) && x >= 0 && y >= 0) {
        hosts[a].line = (struct line){ .up = x, .down = y };
    } else if (sscanf(text, "queue %lf", &x) == 1 && x >= 0) {
        queue_ns = (int64_t)(x * 1e9);
    } else if (sscanf(text, "site %d %d", &a, &b) == 2 && host_number(a) && b >= 0 && b < MAX_HOSTS) {
        hosts[a].site = b;
    } else if (sscanf(text, "line %d %lf %lf", &a, &x, &y) == 3 && a >= 0 && a < MAX_HOSTS && x >= 0 && y >= 0) {
        sites[a] = (struct line){ .up = x, .down = y };
    } else if (sscanf(text, "counts %d %d", &a, &b) == 2 && host_number(a) && host_number(b)) {
        struct pair *pair = &pairs[a][b];
        printf("ok %llu %llu %llu %llu %llu\n", (unsigned long long)pair->delivered, (unsigned long long)pair->lost,
               (unsigned long long)pair->full, (unsigned long long)pair->cut_off, (unsigned long long)pair->bytes);
        return;
    } else {
        printf("error: not understood: %s\n", text);
        return;
    }
    printf("ok\n");
}

/* Commands that have arrived; false at the end of standard input. */
static int read_commands(void) {
    static char text[4096];
    static size_t length;
    ssize_t got = read(0, text + length, sizeof text - 1 - length);
    if (got < 0 && errno == EINTR) return 1;
    if (got <= 0) return 0;
    text[length += got] = 0;
    char *start = text, *end;
    while ((end = strchr(start, '\n'))) {
        *end = 0;
        obey(start);
        start = end + 1;
    }
    length = strlen(start);
    if (length == sizeof text - 1) return 0;
    memmove(text, start, length + 1);
    fflush(stdout);
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 5 || sscanf(argv[1], "%hhu.%hhu.%hhu", &prefix[0], &prefix[1], &prefix[2]) != 3) {
        fprintf(stderr, "usage: wanlab PREFIX HOSTS MTU SEED\n");
        return 2;
    }
    host_count = atoi(argv[2]);
    random_state = strtoull(argv[4], NULL, 10);
    if (host_count < 1 || host_count > MAX_HOSTS) { errno = EINVAL; die("the number of hosts"); }
    prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0);
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    for (int i = 0; i < host_count; i++) open_host(i, atoi(argv[3]));
    if (home < 0 || setns(home, CLONE_NEWNET)) die("the way back");
    printf("ready\n");
    fflush(stdout);
    static unsigned char bytes[MAX_PACKET];
    struct pollfd waits[MAX_HOSTS + 1];
    for (int i = 0; i < host_count; i++) waits[i] = (struct pollfd){ hosts[i].tun, POLLIN, 0 };
    waits[host_count] = (struct pollfd){ 0, POLLIN, 0 };
    for (;;) {
        int64_t now = now_ns();
        deliver(now);
        int64_t wait = heap_size ? heap[0].due - now : 1000000000LL;
        if (wait < 0) wait = 0;
        struct timespec timeout = { wait / 1000000000LL, wait % 1000000000LL };
        if (ppoll(waits, host_count + 1, &timeout, NULL) < 0) {
            if (errno != EINTR) die("ppoll");
            continue;
        }
        now = now_ns();
        for (int i = 0; i < host_count; i++)
            if (waits[i].revents & POLLIN)
                for (int size, n = 0; n < BATCH && (size = read(hosts[i].tun, bytes, sizeof bytes)) > 0; n++)
                    take(i, bytes, size, now);
        if (waits[host_count].revents && !read_commands()) return 0;
    }
}
