/* A load generator: one thread, epoll, HTTP/1.1 with keep-alive, answers checked for status and framing.
 *
 *   load PORT[,PORT...] FILE CONNECTIONS REQUESTS
 *
 * With several ports the connections are distributed among them, one after another.
 * FILE holds records of two 32-bit numbers (conversation, length) and a whole HTTP request of that length.
 * Consecutive records of one conversation are its turns: one connection sends them in order, then takes the
 * next conversation, from the beginning again after the last. Prints one JSON object; times are
 * microseconds, `transit` is from a worker's write to our read of a streamed event, `sticky` the share of
 * turns that reached the worker of the turn before. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "http.h"

enum { HEAD_MOST = 16384, SAMPLES_MOST = 1 << 22, PORTS = 65536, TARGETS_MOST = 64 };
static const unsigned long STALL_NS = 30ul * 1000000000ul;

typedef struct {
  const char *bytes;
  uint32_t size, conversation;
} request;

typedef enum { HEAD, LENGTH, SIZE_LINE, CHUNK, CHUNK_END, TRAILER, UNTIL_CLOSE } state;

typedef struct {
  int fd, is_busy, wants_write;
  struct sockaddr_in *target;
  state state;
  uint32_t turn, last_turn; /* places in `requests` */
  const char *unsent;
  size_t unsent_bytes;
  unsigned long began;
  int status, closes, had_body, worker, previous_worker;
  long left; /* of the body or the chunk */
  char head[HEAD_MOST], line[32], tail[STAMP_BYTES + 8];
  size_t head_bytes, line_bytes, tail_bytes;
} connection;

typedef struct {
  uint32_t *values;
  size_t count;
} samples;

static int poller;
static struct sockaddr_in targets[TARGETS_MOST];
static int target_count;
static request *requests;
static uint32_t request_count, next_turn;
static long wanted, started, finished, failed, events, reads, body_bytes, reopened;
static long sticky, followed, by_worker[PORTS];
static samples latency, first_byte, transit;
static char last_error[160];

static void note(samples *s, unsigned long ns) {
  if (s->count < SAMPLES_MOST) s->values[s->count++] = ns / 10 > UINT32_MAX ? UINT32_MAX : (uint32_t)(ns / 10);
}

static void load_requests(const char *path) {
  int fd = open(path, O_RDONLY);
  struct stat about;
  if (fd < 0 || fstat(fd, &about)) {
    perror(path);
    exit(1);
  }
  const char *bytes = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
  uint32_t room = 0;
  for (const char *at = bytes; at < bytes + about.st_size;) {
    if (request_count == room) requests = must(realloc(requests, (room = room * 2 + 1024) * sizeof *requests));
    request *r = &requests[request_count++];
    memcpy(&r->conversation, at, 4);
    memcpy(&r->size, at + 4, 4);
    r->bytes = at + 8;
    at += 8 + r->size;
  }
  if (!request_count) exit(1);
}

static void dial(connection *c) {
  int yes = 1;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  if (connect(c->fd, (void *)c->target, sizeof *c->target)) {
    perror("load: cannot connect");
    exit(1);
  }
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  struct epoll_event what = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &what);
  c->wants_write = 0;
}

static void hang_up(connection *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
}

static void watch(connection *c, int write) {
  struct epoll_event what = {.events = EPOLLIN | (write ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &what);
  c->wants_write = write;
}

static void push(connection *c) {
  while (c->unsent_bytes) {
    ssize_t sent = send(c->fd, c->unsent, c->unsent_bytes, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EAGAIN && !c->wants_write) watch(c, 1);
      return; /* a broken connection shows when it is read */
    }
    c->unsent += sent;
    c->unsent_bytes -= (size_t)sent;
  }
  if (c->wants_write) watch(c, 0);
}

static void send_turn(connection *c) {
  c->unsent = requests[c->turn].bytes;
  c->unsent_bytes = requests[c->turn].size;
  c->state = HEAD;
  c->head_bytes = c->line_bytes = c->tail_bytes = 0;
  c->status = c->closes = c->had_body = 0;
  c->worker = -1;
  if (c->fd < 0) dial(c);
  c->is_busy = 1;
  c->began = now_ns();
  push(c);
}

static void begin(connection *c) {
  c->is_busy = 0;
  if (started == wanted) return;
  started++;
  if (c->turn == c->last_turn) {
    c->turn = c->last_turn = next_turn;
    while (c->last_turn + 1 < request_count &&
           requests[c->last_turn + 1].conversation == requests[c->turn].conversation)
      c->last_turn++;
    next_turn = (c->last_turn + 1) % request_count;
    c->previous_worker = -1;
  } else
    c->turn++;
  send_turn(c);
}

static void finish(connection *c, const char *broken) {
  finished++;
  if (broken || c->status != 200) {
    failed++;
    snprintf(last_error, sizeof last_error, "status %d%s%s", c->status, broken ? ", " : "", broken ? broken : "");
  } else
    note(&latency, now_ns() - c->began);
  if (c->worker >= 0) {
    by_worker[c->worker]++;
    if (c->previous_worker >= 0) followed++, sticky += c->previous_worker == c->worker;
    c->previous_worker = c->worker;
  }
  if (broken || c->closes) hang_up(c);
  begin(c);
}

/* Stamps in `text`; one that begins in its last STAMP_BYTES - 1 bytes may be cut and is left for the next. */
static void find_stamps(const char *text, size_t size, unsigned long now) {
  const char *end = text + size;
  for (const char *at = text; (at = memmem(at, (size_t)(end - at), STAMP_MARK, STAMP_MARK_BYTES));) {
    if (end - at < STAMP_BYTES) return;
    char digits[STAMP_DIGITS + 1] = {0};
    memcpy(digits, at + STAMP_MARK_BYTES, STAMP_DIGITS);
    note(&transit, now - strtoul(digits, NULL, 10));
    events++;
    at += STAMP_BYTES;
  }
}

static void take_body(connection *c, const char *bytes, size_t size, unsigned long now) {
  body_bytes += (long)size;
  if (!c->had_body) {
    c->had_body = 1;
    note(&first_byte, now - c->began);
  }
  if (c->worker < 0) {
    const char *id = memmem(bytes, size, ANSWERED_BY, sizeof ANSWERED_BY - 1);
    if (id && id + sizeof ANSWERED_BY + 5 < bytes + size) c->worker = atoi(id + sizeof ANSWERED_BY - 1) & (PORTS - 1);
  }
  /* A stamp may be split between two pieces: search around the border first. */
  if (c->tail_bytes) {
    char seam[2 * STAMP_BYTES];
    size_t more = size < STAMP_BYTES - 1 ? size : STAMP_BYTES - 1;
    memcpy(seam, c->tail, c->tail_bytes);
    memcpy(seam + c->tail_bytes, bytes, more);
    find_stamps(seam, c->tail_bytes + more, now);
  }
  find_stamps(bytes, size, now);
  c->tail_bytes = size < STAMP_BYTES - 1 ? size : STAMP_BYTES - 1;
  memcpy(c->tail, bytes + size - c->tail_bytes, c->tail_bytes);
}

/* The head's bytes out of `bytes`; 0 when the answer is broken. */
static size_t take_head(connection *c, const char *bytes, size_t size) {
  size_t before = c->head_bytes, room = HEAD_MOST - 1 - before, part = size < room ? size : room;
  memcpy(c->head + before, bytes, part);
  c->head_bytes += part;
  c->head[c->head_bytes] = 0;
  char *blank = strstr(c->head, "\r\n\r\n");
  if (!blank) return c->head_bytes < HEAD_MOST - 1 ? part : 0;
  framing framed = read_framing(c->head, blank + 2);
  c->status = c->head_bytes > 12 ? atoi(c->head + 9) : 0;
  c->closes = framed.closes;
  c->left = framed.length;
  c->state = framed.chunked ? SIZE_LINE : framed.length >= 0 ? LENGTH : UNTIL_CLOSE;
  return (size_t)(blank + 4 - c->head) - before;
}

static void receive(connection *c, const char *at, size_t size) {
  const char *end = at + size;
  unsigned long now = now_ns();
  while (at < end) {
    size_t part = (size_t)(end - at);
    if ((c->state == LENGTH || c->state == CHUNK) && part > (size_t)c->left) part = (size_t)c->left;
    switch (c->state) {
      case HEAD:
        part = take_head(c, at, part);
        if (!part) return finish(c, "an endless head");
        at += part;
        if (c->state == LENGTH && !c->left) return finish(c, NULL);
        break;
      case LENGTH:
      case CHUNK:
        take_body(c, at, part, now);
        at += part;
        c->left -= (long)part;
        if (c->left) break;
        if (c->state == LENGTH) return finish(c, NULL);
        c->state = CHUNK_END;
        break;
      case SIZE_LINE:
        if (*at++ != '\n') {
          if (c->line_bytes < sizeof c->line - 1) c->line[c->line_bytes++] = at[-1];
          break;
        }
        c->line[c->line_bytes] = 0;
        c->line_bytes = 0;
        c->left = strtol(c->line, NULL, 16);
        c->state = c->left ? CHUNK : TRAILER;
        break;
      case CHUNK_END:
        if (*at++ == '\n') c->state = SIZE_LINE;
        break;
      case TRAILER:
        if (*at++ == '\n') return finish(c, NULL);
        break;
      case UNTIL_CLOSE:
        take_body(c, at, part, now);
        at += part;
        break;
    }
  }
}

static void closed(connection *c) {
  if (!c->is_busy) hang_up(c);
  else if (c->state == UNTIL_CLOSE) c->closes = 1, finish(c, NULL);
  else if (c->state == HEAD && !c->head_bytes && reopened < wanted) {
    /* The worker has just closed an idle connection: not an error, send again on a new one. */
    reopened++;
    hang_up(c);
    send_turn(c);
  } else
    finish(c, "the connection closed");
}

static int ascending(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return x < y ? -1 : x > y;
}

static void print_samples(const char *name, samples *s) {
  qsort(s->values, s->count, sizeof *s->values, ascending);
#define AT(share) (s->count ? s->values[(size_t)((double)(s->count - 1) * (share))] / 100.0 : 0.0)
  printf("\"%s\":{\"count\":%zu,\"p50\":%.2f,\"p90\":%.2f,\"p99\":%.2f,\"max\":%.2f},", name, s->count, AT(.5), AT(.9),
         AT(.99), AT(1));
}

int main(int argc, char **argv) {
  if (argc != 5) return fputs("usage: load PORT[,PORT...] FILE CONNECTIONS REQUESTS\n", stderr), 2;
  signal(SIGPIPE, SIG_IGN);
  for (char *port = strtok(argv[1], ","); port && target_count < TARGETS_MOST; port = strtok(NULL, ","))
    targets[target_count++] = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)),
                                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (!target_count) return fputs("load: no port\n", stderr), 2;
  load_requests(argv[2]);
  int count = atoi(argv[3]);
  wanted = atol(argv[4]);
  latency.values = must(malloc(sizeof(uint32_t) * SAMPLES_MOST));
  first_byte.values = must(malloc(sizeof(uint32_t) * SAMPLES_MOST));
  transit.values = must(malloc(sizeof(uint32_t) * SAMPLES_MOST));
  connection *connections = must(calloc((size_t)count, sizeof *connections));
  poller = epoll_create1(0);
  unsigned long began = now_ns(), heard = began;
  for (int i = 0; i < count; i++) {
    connections[i].target = &targets[i % target_count];
    dial(&connections[i]);
  }
  for (int i = 0; i < count; i++) begin(&connections[i]);
  static char bytes[1 << 20];
  struct epoll_event ready[256];
  while (finished < wanted) {
    int number = epoll_wait(poller, ready, 256, 1000);
    unsigned long now = now_ns();
    if (number > 0) heard = now;
    else if (now - heard > STALL_NS) {
      failed += wanted - finished;
      snprintf(last_error, sizeof last_error, "nothing came for 30 s");
      break;
    }
    for (int i = 0; i < number; i++) {
      connection *c = ready[i].data.ptr;
      if (c->fd < 0) continue;
      if (ready[i].events & EPOLLOUT) push(c);
      if (!(ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) continue;
      ssize_t got = recv(c->fd, bytes, sizeof bytes, 0);
      reads++;
      if (got > 0 && c->is_busy) receive(c, bytes, (size_t)got);
      else if (got == 0 || (got < 0 && errno != EAGAIN)) closed(c);
    }
  }
  double seconds = (double)(now_ns() - began) / 1e9;
  printf("{\"requests\":%ld,\"errors\":%ld,\"reopened\":%ld,\"seconds\":%.6f,\"events\":%ld,\"reads\":%ld,\"bytes\":%ld,",
         finished, failed, reopened, seconds, events, reads, body_bytes);
  print_samples("latency", &latency);
  print_samples("first_byte", &first_byte);
  print_samples("transit", &transit);
  printf("\"sticky\":%.4f,\"workers\":{", followed ? (double)sticky / (double)followed : -1.0);
  int any = 0;
  for (int i = 0; i < PORTS; i++)
    if (by_worker[i]) printf("%s\"%d\":%ld", any++ ? "," : "", i, by_worker[i]);
  printf("},\"last_error\":\"%s\"}\n", last_error);
  return 0;
}
