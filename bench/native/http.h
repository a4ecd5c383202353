/* What worker.c and load.c share: the clock, a growing buffer and the little of HTTP/1.1 that both read. */
#ifndef KVROUTE_BENCH_HTTP_H
#define KVROUTE_BENCH_HTTP_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

/* Every streamed event carries when it was written: this mark, then STAMP_DIGITS digits of CLOCK_MONOTONIC
 * nanoseconds. Load and workers run on one machine, so the reader can tell how long the event took. */
#define STAMP_MARK "@sent:"
#define STAMP_MARK_BYTES 6
#define STAMP_DIGITS 19
#define STAMP_BYTES (STAMP_MARK_BYTES + STAMP_DIGITS)

/* Ids of answers begin with this and the worker's port. */
#define ANSWERED_BY "\"id\":\"w"

static inline unsigned long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (unsigned long)t.tv_sec * 1000000000ul + (unsigned long)t.tv_nsec;
}

static inline void *must(void *memory) {
  if (!memory) {
    fputs("out of memory\n", stderr);
    exit(1);
  }
  return memory;
}

typedef struct {
  char *bytes;
  size_t start, end, room; /* what is unread lies between start and end */
} buffer;

/* Room for `more` bytes and a NUL behind them. */
static inline char *reserve(buffer *b, size_t more) {
  if (b->start == b->end) b->start = b->end = 0;
  if (b->room - b->end <= more) {
    if (b->start) memmove(b->bytes, b->bytes + b->start, b->end - b->start);
    b->end -= b->start;
    b->start = 0;
    if (b->room - b->end <= more) {
      b->room = (b->end + more + 1) * 2;
      b->bytes = must(realloc(b->bytes, b->room));
    }
  }
  return b->bytes + b->end;
}

typedef struct {
  long length; /* Content-Length, -1 if there is none */
  int chunked, closes, expects;
} framing;

/* The framing that the head between `head` and `end` (its blank line) announces. */
static inline framing read_framing(const char *head, const char *end) {
  framing found = {-1, 0, 0, 0};
  const char *line = memchr(head, '\n', (size_t)(end - head));
  while (line && line + 1 < end) {
    const char *field = line + 1;
    if (!strncasecmp(field, "content-length:", 15)) found.length = atol(field + 15);
    else if (!strncasecmp(field, "transfer-encoding:", 18)) found.chunked = 1;
    else if (!strncasecmp(field, "connection: close", 17)) found.closes = 1;
    else if (!strncasecmp(field, "expect:", 7)) found.expects = 1;
    line = memchr(field, '\n', (size_t)(end - field));
  }
  return found;
}

#endif
