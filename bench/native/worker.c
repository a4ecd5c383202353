/* A vLLM worker that does almost no work: one thread, epoll, HTTP/1.1 with keep-alive.
 *
 *   worker [-c CHUNKS] [-g GAP_US] [-e EVENT_BYTES] [-m MODEL] [-t] PORT
 *
 * A body that asks for a stream gets CHUNKS events of EVENT_BYTES, one write each, GAP_US apart, the first
 * after one gap, then one with `usage`, then [DONE]; any other POST gets a short answer at once. A prompt that
 * another worker will answer gets the `kv_transfer_params` of vLLM's NixlConnector, one block per 64 bytes.
 * `usage` counts a token per four bytes of the body, and as cached what an engine with room for all would hold:
 * whole blocks of 16 tokens of a body's beginning that came before, and the answer to it.
 * With -t it also tokenizes (one id per four bytes of the messages), as vLLM does and some routers ask it to. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "http.h"

enum { READ_BYTES = 65536, HEAD_BYTES = 256, BLOCK_BYTES = 64, BLOCK_TOKENS = 16, SEEN = 1 << 20, /* 64 - 44 bits */ ANSWER_TOKENS = 50 };

typedef struct client {
  int fd, is_gone, is_queued, wants_write;
  buffer in, out;
  size_t head; /* bytes of the request's head, 0 while it is incomplete */
  framing framed;
  size_t tokens, cached; /* of its last prompt */
  size_t scanned; /* bytes of a chunked body that are parsed, from its request's start */
  int events_left;
  unsigned long due;
  struct client *next;
} client;

static int poller, port, chunks = 200, tokenizes;
static unsigned long gap_ns = 10000000ul;
static size_t event_bytes = 280;
static const char *model = "bench";
static client *first_due, *last_due; /* all gaps are equal, so this queue is in order of time */
static char *event, *stamp;          /* one streamed event with its framing, and where its stamp goes */
static size_t event_size;
static char answer[1024];
static size_t answer_size;
static char *usage_of_answer;  /* where its usage goes */
static uint64_t seen[SEEN];    /* chained hashes of the first SEEN / 2 blocks */
static size_t seen_blocks;
#define USAGE "\"prompt_tokens\":%8zu,\"completion_tokens\":%8d,\"total_tokens\":%8zu,\"prompt_tokens_details\":{\"cached_tokens\":%8zu}}"

static void watch(client *c, int write) {
  struct epoll_event what = {.events = EPOLLIN | (write ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &what);
  c->wants_write = write;
}

static void flush(client *c) {
  while (c->out.start < c->out.end) {
    ssize_t sent = send(c->fd, c->out.bytes + c->out.start, c->out.end - c->out.start, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN) c->is_gone = 1;
      else if (!c->wants_write) watch(c, 1);
      return;
    }
    c->out.start += (size_t)sent;
  }
  if (c->wants_write) watch(c, 0);
}

static void put(client *c, const char *bytes, size_t size) {
  if (c->out.start == c->out.end) {
    ssize_t sent = send(c->fd, bytes, size, MSG_NOSIGNAL);
    if (sent == (ssize_t)size) return;
    if (sent < 0 && errno != EAGAIN) {
      c->is_gone = 1;
      return;
    }
    if (sent > 0) bytes += sent, size -= (size_t)sent;
  }
  memcpy(reserve(&c->out, size), bytes, size);
  c->out.end += size;
  if (!c->wants_write) watch(c, 1);
}

static void reply(client *c, const char *status, const char *type, const char *body, size_t size) {
  char *whole = must(malloc(HEAD_BYTES + size));
  int head = snprintf(whole, HEAD_BYTES, "HTTP/1.1 %s\r\nserver: bench\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n",
                      status, type, size);
  memcpy(whole + head, body, size);
  put(c, whole, (size_t)head + size);
  free(whole);
}

/* Ids that depend on the text, so that equal beginnings have equal ids. */
static void tokenize(client *c, const char *body, size_t size, int renders) {
  const char *messages = memmem(body, size, "\"messages\"", 10);
  size_t from = messages ? (size_t)(messages - body) : 0, count = (size - from) / 4;
  char *json = must(malloc(count * 6 + 512));
  char *to = json + (renders ? sprintf(json, "{\"request_id\":\"r\",\"model\":\"%s\",\"token_ids\":[1", model)
                             : sprintf(json, "{\"count\":%zu,\"max_model_len\":262144,\"tokens\":[1", count + 1));
  for (size_t i = 0; i < count; i++) {
    uint32_t word;
    memcpy(&word, body + from + 4 * i, 4);
    uint32_t id = 10000 + ((word * 2654435761u) >> 16) % 40000;
    char digits[6] = {','};
    for (int place = 5; place; place--, id /= 10) digits[place] = (char)('0' + id % 10);
    memcpy(to, digits, 6);
    to += 6;
  }
  to += sprintf(to, renders ? "],\"sampling_params\":{\"temperature\":1.0,\"max_tokens\":64},\"stream\":false,\"priority\":0}"
                            : "],\"token_strs\":null}");
  reply(c, "200 OK", "application/json", json, (size_t)(to - json));
  free(json);
}

/* The answer of a prefill worker: where the blocks of the prompt are. */
static void reply_blocks(client *c, size_t size) {
  size_t count = size / 64 + 1;
  char *json = must(malloc(count * 6 + 1024));
  char *to = json + sprintf(json, "{\"id\":\"w%d\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"%s\",\"choices\":[{"
                                  "\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"the\"},\"finish_reason\":\"length\""
                                  "}],\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":1,\"total_tokens\":101},"
                                  "\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
                                  "\"remote_engine_id\":\"0b4bb1c2-8f1c-4a51-9d0f-3f2f0e6f9a11\",\"remote_request_id\":\"r\","
                                  "\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,\"remote_block_ids\":[[1",
                            port, model);
  for (size_t i = 1; i < count; i++) to += sprintf(to, ",%zu", i % 10000);
  to += sprintf(to, "]]}}");
  reply(c, "200 OK", "application/json", json, (size_t)(to - json));
  free(json);
}

/* Counts the prompt, and remembers it. */
static void count(client *c, const char *body, size_t size) {
  size_t blocks = size / BLOCK_BYTES, held = 0;
  uint64_t hash = 1;
  for (size_t i = 0; i < blocks; i++) {
    for (size_t at = 0; at < BLOCK_BYTES; at += 8) {
      uint64_t word;
      memcpy(&word, body + i * BLOCK_BYTES + at, 8);
      hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    size_t slot = hash >> 44;
    while (seen[slot] && seen[slot] != hash) slot = (slot + 1) % SEEN;
    if (seen[slot] && held == i) held++;
    if (!seen[slot] && seen_blocks < SEEN / 2) seen[slot] = hash, seen_blocks++;
  }
  size_t most = size / 4 ? (size / 4 - 1) / BLOCK_TOKENS * BLOCK_TOKENS : 0;
  c->tokens = size / 4;
  c->cached = held ? held * BLOCK_TOKENS + (ANSWER_TOKENS + BLOCK_TOKENS) / BLOCK_TOKENS * BLOCK_TOKENS : 0;
  if (c->cached > most) c->cached = most;
}

static void schedule(client *c) {
  c->next = NULL;
  c->is_queued = 1;
  if (first_due) last_due->next = c;
  else first_due = c;
  last_due = c;
}

static void post(client *c, const char *head, const char *body, size_t size) {
  const char *line_end = strchr(head, '\r');
  int renders = memmem(head, (size_t)(line_end - head), "/render ", 8) != NULL;
  if (renders || memmem(head, (size_t)(line_end - head), "/tokenize ", 10)) {
    static const char missing[] = "{\"detail\":\"Not Found\"}";
    if (tokenizes) tokenize(c, body, size, renders);
    else reply(c, "404 Not Found", "application/json", missing, sizeof missing - 1);
    return;
  }
  if (memmem(body, size, "\"do_remote_decode\":true", 23)) {
    reply_blocks(c, size);
    return;
  }
  count(c, body, size);
  if (!memmem(body, size, "\"stream\":true", 13) && !memmem(body, size, "\"stream\": true", 14)) {
    char usage[160];
    int length = snprintf(usage, sizeof usage, USAGE, c->tokens, ANSWER_TOKENS, c->tokens + ANSWER_TOKENS, c->cached);
    memcpy(usage_of_answer, usage, (size_t)length);
    put(c, answer, answer_size);
    return;
  }
  static const char begin[] = "HTTP/1.1 200 OK\r\nserver: bench\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                              "transfer-encoding: chunked\r\n\r\n";
  put(c, begin, sizeof begin - 1);
  c->events_left = chunks + 1;
  c->due = now_ns() + gap_ns;
  schedule(c);
}

static void get(client *c, const char *head) {
  char text[1024];
  const char *type = "application/json", *path = head + 4;
  int size;
  if (!strncmp(path, "/v1/models", 10))
    size = snprintf(text, sizeof text,
                    "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"created\":1,\"owned_by\":\"vllm\","
                    "\"root\":\"%s\",\"parent\":null,\"max_model_len\":262144}]}", model, model);
  else if (!strncmp(path, "/metrics", 8)) {
    type = "text/plain; version=0.0.4";
    size = snprintf(text, sizeof text,
                    "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"%s\"} 0.0\n"
                    "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=\"%s\"} 0.0\n"
                    "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=\"%s\"} 0.1\n"
                    /* Room for all prompts of a scenario, also if each worker gets all of them (as with roles):
                       eviction is not what the scenarios compare. */
                    "# TYPE vllm:cache_config_info gauge\n"
                    "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"250000\"} 1.0\n",
                    model, model, model);
  } else
    size = snprintf(text, sizeof text, "{\"status\":\"ok\",\"model_path\":\"%s\",\"served_model_name\":\"%s\","
                                       "\"is_generation\":true,\"version\":\"0.32.0\"}", model, model);
  reply(c, "200 OK", type, text, (size_t)size);
}

/* Bytes of the chunked body that begins at `body`, framing included; 0 while it is incomplete. */
static size_t chunked_size(client *c, const char *request, size_t have) {
  for (;;) {
    const char *line = request + c->scanned, *end = memchr(line, '\n', have - c->scanned);
    if (!end) return 0;
    size_t size = strtoul(line, NULL, 16), next = (size_t)(end + 1 - request) + size + 2;
    if (next > have) return 0;
    c->scanned = next;
    if (!size) return next - c->head;
  }
}

/* Answers the first request in the buffer; 0 while it is incomplete. */
static int answer_next(client *c) {
  char *request = c->in.bytes + c->in.start;
  size_t have = c->in.end - c->in.start;
  if (!c->head) {
    char *blank = memmem(request, have, "\r\n\r\n", 4);
    if (!blank) return 0;
    c->head = c->scanned = (size_t)(blank + 4 - request);
    c->framed = read_framing(request, blank + 2);
    if (c->framed.expects) put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
  }
  size_t size = c->framed.length > 0 ? (size_t)c->framed.length : 0;
  if (c->framed.chunked) {
    if (!(size = chunked_size(c, request, have))) return 0;
  } else if (have < c->head + size)
    return 0;
  if (!strncmp(request, "POST ", 5)) post(c, request, request + c->head, size);
  else if (!strncmp(request, "GET ", 4)) get(c, request);
  else c->is_gone = 1; /* such as the HTTP/2 preface, with which some routers detect a worker's protocol */
  c->in.start += c->head + size;
  c->head = 0;
  return 1;
}

static void answer_all(client *c) {
  while (!c->is_gone && !c->events_left && c->in.start < c->in.end && answer_next(c)) continue;
}

static void read_requests(client *c) {
  for (;;) {
    char *to = reserve(&c->in, READ_BYTES);
    size_t room = c->in.room - c->in.end - 1;
    ssize_t got = recv(c->fd, to, room, 0);
    if (got > 0) {
      c->in.end += (size_t)got;
      to[got] = 0;
      if ((size_t)got < room) break;
    } else {
      if (!got || errno != EAGAIN) c->is_gone = 1;
      break;
    }
  }
  answer_all(c);
}

static void send_event(client *c) {
  if (--c->events_left) {
    char digits[STAMP_DIGITS + 1];
    snprintf(digits, sizeof digits, "%0*lu", STAMP_DIGITS, now_ns());
    memcpy(stamp, digits, STAMP_DIGITS);
    put(c, event, event_size);
    return;
  }
  char text[640], whole[700];
  int size = snprintf(text, sizeof text,
                      "data: {\"id\":\"w%d\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"%s\",\"choices\":[{"
                      "\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{" USAGE "}\n\ndata: [DONE]\n\n",
                      port, model, c->tokens, chunks, c->tokens + (size_t)chunks, c->cached);
  int framed = snprintf(whole, sizeof whole, "%x\r\n%s\r\n0\r\n\r\n", (unsigned)size, text);
  put(c, whole, (size_t)framed);
}

static void discard(client *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
  if (c->is_queued) return; /* the code that removes it from the queue frees it */
  free(c->in.bytes);
  free(c->out.bytes);
  free(c);
}

static void send_due(void) {
  unsigned long now = now_ns();
  while (first_due && first_due->due <= now) {
    client *c = first_due;
    first_due = c->next;
    c->is_queued = 0;
    if (!c->is_gone) send_event(c);
    if (!c->is_gone && c->events_left) {
      c->due += gap_ns;
      if (c->due < now) c->due = now + gap_ns;
      schedule(c);
    } else
      answer_all(c);
    if (c->is_gone && !c->is_queued) discard(c);
  }
}

static void prepare(void) {
  const char *words = "the quick brown fox jumps over the lazy dog and ";
  size_t head = (size_t)snprintf(NULL, 0, "data: {\"id\":\"w%d\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":"
                                          "\"%s\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s", port, model, STAMP_MARK);
  const char *tail = "\"},\"finish_reason\":null}]}\n\n";
  size_t least = head + STAMP_DIGITS + strlen(tail);
  size_t size = event_bytes > least ? event_bytes : least;
  event = must(malloc(size + 32));
  char *to = event + sprintf(event, "%zx\r\n", size);
  to += sprintf(to, "data: {\"id\":\"w%d\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"%s\",\"choices\":[{"
                    "\"index\":0,\"delta\":{\"content\":\"%s", port, model, STAMP_MARK);
  stamp = to;
  to += STAMP_DIGITS;
  for (size_t i = 0; i < size - least; i++) *to++ = words[i % strlen(words)];
  to += sprintf(to, "%s\r\n", tail);
  event_size = (size_t)(to - event);

  char filler[201], body[800];
  for (int i = 0; i < 200; i++) filler[i] = words[(size_t)i % strlen(words)];
  filler[200] = 0;
  int length = snprintf(body, sizeof body,
                        "{\"id\":\"w%d\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"%s\",\"choices\":[{\"index\":0,"
                        "\"message\":{\"role\":\"assistant\",\"content\":\"%s\"},\"finish_reason\":\"stop\"}],\"usage\":{"
                        USAGE "}", port, model, filler, (size_t)0, 0, (size_t)0, (size_t)0);
  answer_size = (size_t)snprintf(answer, sizeof answer, "HTTP/1.1 200 OK\r\nserver: bench\r\ncontent-type: application/json"
                                                        "\r\ncontent-length: %d\r\n\r\n%s", length, body);
  usage_of_answer = strstr(answer, "\"prompt_tokens\"");
}

static int listen_at(void) {
  int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(fd, (void *)&at, sizeof at) || listen(fd, 1024)) {
    perror("worker: cannot listen");
    exit(1);
  }
  return fd;
}

static void accept_all(int listener) {
  int fd, yes = 1;
  while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    client *c = must(calloc(1, sizeof *c));
    c->fd = fd;
    struct epoll_event what = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &what);
  }
}

int main(int argc, char **argv) {
  for (int flag; (flag = getopt(argc, argv, "c:g:e:m:t")) != -1;) switch (flag) {
    case 'c': chunks = atoi(optarg); break;
    case 'g': gap_ns = strtoul(optarg, NULL, 10) * 1000; break;
    case 'e': event_bytes = strtoul(optarg, NULL, 10); break;
    case 'm': model = optarg; break;
    case 't': tokenizes = 1; break;
    default: return 2;
  }
  if (optind + 1 != argc || strlen(model) > 64) return fputs("usage: worker [options] PORT (see the source)\n", stderr), 2;
  port = atoi(argv[optind]);
  signal(SIGPIPE, SIG_IGN);
  prepare();
  int listener = listen_at();
  poller = epoll_create1(0);
  struct epoll_event what = {.events = EPOLLIN, .data.ptr = NULL}, ready[256];
  epoll_ctl(poller, EPOLL_CTL_ADD, listener, &what);
  for (;;) {
    struct timespec wait = {0, 0};
    if (first_due) {
      unsigned long now = now_ns(), left = first_due->due > now ? first_due->due - now : 0;
      wait.tv_sec = (time_t)(left / 1000000000ul);
      wait.tv_nsec = (long)(left % 1000000000ul);
    }
    int count = epoll_pwait2(poller, ready, 256, first_due ? &wait : NULL, NULL);
    for (int i = 0; i < count; i++) {
      client *c = ready[i].data.ptr;
      if (!c) {
        accept_all(listener);
        continue;
      }
      if (c->is_gone) continue;
      if (ready[i].events & EPOLLOUT) flush(c);
      if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_requests(c);
      if (c->is_gone) discard(c);
    }
    send_due();
  }
}
