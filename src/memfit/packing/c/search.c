// The exhaustive search for offsets within a capacity. src/memfit/packing/exhaustive_search.py says what it relies on.
//
//   part      buffers that meet no others: ordered by preference, then
//   descend   each that may be the next one is
//   settle    placed; what is left may fall into parts, each searched for itself

#include <stdlib.h>

#include "pack.h"

#define UNPLACED (-1)
#define PREFERENCES 3

typedef struct {
  int32_t index;
  int64_t before;
} change;

typedef struct {
  change *items;
  int64_t count, room;
} trail;

typedef struct {
  int32_t buffers, sections;
  const int32_t *first, *last;
  const int64_t *size;
  const double *area, *length;
  int64_t capacity;
  const char *preference;
  int64_t nodes, node_limit;
  int32_t wrapping;  // buffers not placed that live beyond the last section, in the first ones
  const atomic_int *cancelled;
  int64_t *solution;

  int32_t *overlaps, *overlaps_from;  // of buffer b: overlaps[overlaps_from[b]] up to [overlaps_from[b + 1]]
  int32_t *members, *members_from;    // of a section: its buffers
  int64_t *floor;                     // of a section: nothing more fits below it
  int64_t *left;                      // of a section: bytes of its buffers that are not placed
  int32_t *across;                    // of a section: buffers not placed that are in the next one, too
  int64_t *placed;                    // of a buffer: its offset, or UNPLACED
  int64_t *lowest;                    // of a buffer not placed: where it would come to lie
  int32_t *rank;                      // of a buffer, in its part
  uint8_t *raised;                    // of a section: whether `lowest` of a member was; false between placements
  trail floors, lowests;
} search;

typedef struct {
  int32_t from, to;  // sections
  int32_t *order;    // buffers that are not placed, the most promising first
  int32_t count;
} part;

static int search_part(search *s, const part *p);

// ------------------------------------------------------------------------------------------------- changes, undone

static int reserve(trail *t, int64_t more) {
  if (t->count + more <= t->room) return 1;
  int64_t room = 2 * (t->count + more);
  change *items = realloc(t->items, (size_t)room * sizeof *items);
  if (!items) return 0;
  t->items = items;
  t->room = room;
  return 1;
}

static void set(trail *t, int64_t *values, int32_t index, int64_t value) {
  t->items[t->count++] = (change){index, values[index]};
  values[index] = value;
}

static void undo(trail *t, int64_t *values, int64_t count) {
  while (t->count > count) {
    change last = t->items[--t->count];
    values[last.index] = last.before;
  }
}

// ------------------------------------------------------------------------------------------------- the circle of time

static int wraps(const search *s, int32_t buffer) { return s->last[buffer] > s->sections; }

static int32_t on_circle(const search *s, int32_t section) {
  return section < s->sections ? section : section - s->sections;
}

// Count a buffer in, or out, of those that are in both of two neighbouring sections.
static int held_across(search *s, int32_t buffer, int32_t change) {
  int any_free = 0;
  for (int32_t i = s->first[buffer]; i + 1 < s->last[buffer]; i++) {
    int32_t section = on_circle(s, i);
    if (section + 1 < s->sections) any_free |= (s->across[section] += change) == 0;
  }
  return any_free;
}

// ------------------------------------------------------------------------------------------------- one buffer placed

static int has_room(search *s, int32_t buffer) {
  return reserve(&s->floors, 2 * (int64_t)s->sections) &&
         reserve(&s->lowests, s->overlaps_from[buffer + 1] - s->overlaps_from[buffer]);
}

// Place a buffer where it comes to lie, and raise what lies on it.
static void place(search *s, int32_t buffer) {
  int64_t end = s->lowest[buffer] + s->size[buffer];
  s->placed[buffer] = s->lowest[buffer];
  for (int32_t i = s->first[buffer]; i < s->last[buffer]; i++) {
    int32_t section = on_circle(s, i);
    set(&s->floors, s->floor, section, end);
    s->left[section] -= s->size[buffer];
  }
  s->wrapping -= wraps(s, buffer);
  int32_t from = s->sections, to = 0;
  for (int32_t i = s->overlaps_from[buffer]; i < s->overlaps_from[buffer + 1]; i++) {
    int32_t other = s->overlaps[i];
    if (s->placed[other] != UNPLACED || s->lowest[other] >= end) continue;
    set(&s->lowests, s->lowest, other, end);
    for (int32_t j = s->first[other]; j < s->last[other]; j++) s->raised[on_circle(s, j)] = 1;
    if (wraps(s, other)) from = 0;
    if (s->first[other] < from) from = s->first[other];
    if (s->last[other] > to) to = s->last[other] < s->sections ? s->last[other] : s->sections;
  }
  for (int32_t section = from; section < to; section++) {
    if (!s->raised[section]) continue;
    s->raised[section] = 0;
    int64_t least = INT64_MAX;
    for (int32_t i = s->members_from[section]; i < s->members_from[section + 1]; i++) {
      int32_t member = s->members[i];
      if (s->placed[member] == UNPLACED && s->lowest[member] < least) least = s->lowest[member];
    }
    if (least != INT64_MAX && least > s->floor[section]) set(&s->floors, s->floor, section, least);
  }
}

static void take_back(search *s, int32_t buffer, int64_t floors, int64_t lowests) {
  undo(&s->floors, s->floor, floors);
  undo(&s->lowests, s->lowest, lowests);
  for (int32_t i = s->first[buffer]; i < s->last[buffer]; i++) s->left[on_circle(s, i)] += s->size[buffer];
  s->wrapping += wraps(s, buffer);
  s->placed[buffer] = UNPLACED;
}

// Whether every section can still hold what is left of it; all that is placed from now on lies at offset or above.
static int may_fit(const search *s, int32_t from, int32_t to, int64_t offset) {
  for (int32_t section = from; section < to; section++) {
    int64_t floor = s->floor[section] > offset ? s->floor[section] : offset;
    if (s->left[section] > s->capacity - floor) return 0;
  }
  return 1;
}

// ------------------------------------------------------------------------------------------------- the search

static int descend(search *s, const part *p, int64_t least, int32_t least_rank);

// Search what is left of a part that falls apart where nothing is held across.
static int search_parts(search *s, const part *p) {
  int32_t *inside = malloc((size_t)p->count * sizeof *inside);
  if (!inside) return NO_HOST_MEMORY;
  int status = FOUND;
  int32_t from = p->from;
  for (int32_t section = p->from; section < p->to && status == FOUND; section++) {
    if (section + 1 < p->to && s->across[section]) continue;
    part piece = {.from = from, .to = section + 1, .order = inside, .count = 0};
    for (int32_t i = 0; i < p->count; i++) {
      int32_t other = p->order[i];
      if (s->placed[other] == UNPLACED && s->first[other] >= from && s->last[other] <= section + 1)
        inside[piece.count++] = other;
    }
    if (piece.count) status = search_part(s, &piece);
    from = section + 1;
  }
  free(inside);
  return status;
}

// Search on below a buffer that was placed.
static int settle(search *s, const part *p, int32_t buffer) {
  int64_t offset = s->placed[buffer];
  s->solution[buffer] = offset;
  int falls_apart = held_across(s, buffer, -1);
  // What wraps holds both ends together; when the last such buffer is placed, all that came apart before counts.
  int in_parts = !s->wrapping && (falls_apart || wraps(s, buffer));
  int status = in_parts ? search_parts(s, p) : descend(s, p, offset, s->rank[buffer]);
  held_across(s, buffer, 1);
  return status;
}

// Place one buffer after the other, none below `least`, nor at it if it ranks before `least_rank`.
static int descend(search *s, const part *p, int64_t least, int32_t least_rank) {
  if (++s->nodes > s->node_limit) return NODE_LIMIT;
  if (atomic_load_explicit(s->cancelled, memory_order_relaxed)) return CANCELLED;
  part rest = {.from = p->from, .to = p->to, .order = malloc((size_t)p->count * sizeof *rest.order), .count = 0};
  if (!rest.order) return NO_HOST_MEMORY;
  int64_t ceiling = INT64_MAX;  // a buffer at or above it would leave a gap that another one fits into
  for (int32_t i = 0; i < p->count; i++) {
    int32_t buffer = p->order[i];
    if (s->placed[buffer] != UNPLACED) continue;
    int64_t lowest = s->lowest[buffer];
    if (lowest + s->size[buffer] < ceiling) ceiling = lowest + s->size[buffer];
    int32_t at = rest.count++;  // nearly sorted already, as the node above had them
    for (; at > 0; at--) {
      int32_t other = rest.order[at - 1];
      if (s->lowest[other] < lowest || (s->lowest[other] == lowest && s->rank[other] < s->rank[buffer])) break;
      rest.order[at] = other;
    }
    rest.order[at] = buffer;
  }
  int status = rest.count ? INFEASIBLE : FOUND;
  for (int32_t i = 0; i < rest.count && status == INFEASIBLE; i++) {
    int32_t buffer = rest.order[i];
    int64_t offset = s->lowest[buffer];
    if (offset >= ceiling) break;
    if (offset < least || (offset == least && s->rank[buffer] < least_rank)) continue;
    if (!has_room(s, buffer)) {
      status = NO_HOST_MEMORY;
      break;
    }
    int64_t floors = s->floors.count, lowests = s->lowests.count;
    place(s, buffer);
    if (may_fit(s, p->from, p->to, offset)) status = settle(s, &rest, buffer);
    take_back(s, buffer, floors, lowests);
  }
  free(rest.order);
  return status;
}

typedef struct {
  double keys[PREFERENCES];
  int32_t buffer;
} ranked;

static int by_keys(const void *one, const void *two) {
  const ranked *a = one, *b = two;
  for (int i = 0; i < PREFERENCES; i++)
    if (a->keys[i] != b->keys[i]) return a->keys[i] > b->keys[i] ? -1 : 1;
  return a->buffer < b->buffer ? -1 : 1;
}

// What a letter of the preference orders by, the largest first.
static double key(const search *s, int32_t buffer, char letter) {
  if (letter == 'A') return s->area[buffer];
  if (letter == 'L') return s->length[buffer];
  int64_t most = 0;  // 'T': bytes left in the fullest of its sections
  for (int32_t i = s->first[buffer]; i < s->last[buffer]; i++)
    if (s->left[on_circle(s, i)] > most) most = s->left[on_circle(s, i)];
  return (double)most;
}

static int search_part(search *s, const part *p) {
  ranked *ranks = malloc((size_t)p->count * sizeof *ranks);
  int32_t *before = malloc((size_t)p->count * sizeof *before);
  int status = NO_HOST_MEMORY;
  if (ranks && before) {
    for (int32_t i = 0; i < p->count; i++) {
      ranks[i].buffer = p->order[i];
      for (int j = 0; j < PREFERENCES; j++) ranks[i].keys[j] = key(s, p->order[i], s->preference[j]);
    }
    qsort(ranks, (size_t)p->count, sizeof *ranks, by_keys);
    for (int32_t i = 0; i < p->count; i++) {
      p->order[i] = ranks[i].buffer;
      before[i] = s->rank[p->order[i]];
      s->rank[p->order[i]] = i;
    }
    status = descend(s, p, 0, 0);
    for (int32_t i = 0; i < p->count; i++) s->rank[p->order[i]] = before[i];
  }
  free(ranks);
  free(before);
  return status;
}

// ------------------------------------------------------------------------------------------------- from the beginning

static int overlap(const search *s, int32_t one, int32_t two) {
  return one != two && meet(s->first[one], s->last[one], s->first[two], s->last[two], s->sections);
}

// Make the lists of who meets whom and who is where; false if there is no memory for them.
static int make_lists(search *s) {
  int64_t pairs = 0, memberships = 0;
  for (int32_t b = 0; b < s->buffers; b++) {
    memberships += s->last[b] - s->first[b];
    for (int32_t other = 0; other < s->buffers; other++) pairs += overlap(s, b, other);
  }
  s->overlaps = malloc((size_t)(pairs + 1) * sizeof *s->overlaps);
  s->members = malloc((size_t)(memberships + 1) * sizeof *s->members);
  if (!s->overlaps || !s->members) return 0;
  int32_t next = 0;
  for (int32_t b = 0; b < s->buffers; b++) {
    s->overlaps_from[b] = next;
    for (int32_t other = 0; other < s->buffers; other++)
      if (overlap(s, b, other)) s->overlaps[next++] = other;
  }
  s->overlaps_from[s->buffers] = next;
  next = 0;
  for (int32_t section = 0; section < s->sections; section++) {
    s->members_from[section] = next;
    for (int32_t b = 0; b < s->buffers; b++)
      if ((s->first[b] <= section && section < s->last[b]) || section + s->sections < s->last[b])
        s->members[next++] = b;
  }
  s->members_from[s->sections] = next;
  for (int32_t b = 0; b < s->buffers; b++) {
    s->placed[b] = UNPLACED;
    for (int32_t i = s->first[b]; i < s->last[b]; i++) s->left[on_circle(s, i)] += s->size[b];
    s->wrapping += wraps(s, b);
    held_across(s, b, 1);
  }
  return 1;
}

static int search_all(search *s) {
  if (!may_fit(s, 0, s->sections, 0)) return INFEASIBLE;
  part all = {.from = 0, .to = s->sections, .order = malloc((size_t)s->buffers * sizeof *all.order)};
  if (!all.order) return NO_HOST_MEMORY;
  for (; all.count < s->buffers; all.count++) all.order[all.count] = all.count;
  int status = s->wrapping ? search_part(s, &all) : search_parts(s, &all);
  free(all.order);
  return status;
}

int pack_search(int32_t buffers, int32_t sections, const int32_t *first, const int32_t *last, const int64_t *size,
                const double *area, const double *length, int64_t capacity, const char *preference,
                int64_t node_limit, const atomic_int *cancelled, int64_t *offset, int64_t *nodes) {
  search s = {
      .buffers = buffers,
      .sections = sections,
      .first = first,
      .last = last,
      .size = size,
      .area = area,
      .length = length,
      .capacity = capacity,
      .preference = preference,
      .node_limit = node_limit,
      .cancelled = cancelled,
      .solution = offset,
  };
  size_t n = (size_t)buffers, m = (size_t)sections;
  s.overlaps_from = calloc(n + 1, sizeof *s.overlaps_from);
  s.members_from = calloc(m + 1, sizeof *s.members_from);
  s.floor = calloc(m, sizeof *s.floor);
  s.left = calloc(m, sizeof *s.left);
  s.across = calloc(m, sizeof *s.across);
  s.placed = calloc(n, sizeof *s.placed);
  s.lowest = calloc(n, sizeof *s.lowest);
  s.rank = calloc(n, sizeof *s.rank);
  s.raised = calloc(m, sizeof *s.raised);
  int made = s.overlaps_from && s.members_from && s.floor && s.left && s.across && s.placed && s.lowest && s.rank &&
             s.raised && make_lists(&s);
  int status = made ? search_all(&s) : NO_HOST_MEMORY;
  *nodes = s.nodes;
  void *all[] = {s.overlaps, s.overlaps_from, s.members, s.members_from, s.floor,       s.left,       s.across,
                 s.placed,   s.lowest,        s.rank,    s.raised,       s.floors.items, s.lowests.items};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  return status;
}
