// Pairs of numbers in their order: a treap.
//
// Source: Seidel and Aragon, Randomized Search Trees, Algorithmica 16, 1996; Marsaglia, Xorshift RNGs, 2003.

#include <stdlib.h>

#include "heap.h"

static int is_before(pair a, pair b) { return a.first < b.first || (a.first == b.first && a.second < b.second); }

// Cut a tree in two: what comes before a pair, and the rest.
static void cut(pairs *p, uint32_t at, pair middle, uint32_t *before, uint32_t *rest) {
  if (!at) {
    *before = *rest = 0;
    return;
  }
  node *n = p->nodes + at;
  if (is_before(n->pair, middle)) {
    *before = at;
    cut(p, n->right, middle, &n->right, rest);
  } else {
    *rest = at;
    cut(p, n->left, middle, before, &n->left);
  }
}

// Join two trees, of which all of one comes before the other.
static uint32_t join(pairs *p, uint32_t before, uint32_t after) {
  if (!before || !after) return before ? before : after;
  node *b = p->nodes + before, *a = p->nodes + after;
  if (b->priority > a->priority) {
    b->right = join(p, b->right, after);
    return before;
  }
  a->left = join(p, before, a->left);
  return after;
}

int pairs_reserve(pairs *p, int64_t count) {
  if (count >= UINT32_MAX) return 0;
  while (p->room <= count) // the first node is none's
    if (!grow((void **)&p->nodes, p->room, &p->room, sizeof *p->nodes)) return 0;
  return 1;
}

void pairs_add(pairs *p, pair added) {
  uint32_t made = p->unused, before, rest;
  if (made) p->unused = p->nodes[made].left;
  else made = ++p->made;
  p->seed = p->seed ? p->seed : 0x9E3779B9;
  p->seed ^= p->seed << 13;
  p->seed ^= p->seed >> 17;
  p->seed ^= p->seed << 5;
  p->nodes[made] = (node){.pair = added, .priority = p->seed};
  cut(p, p->root, added, &before, &rest);
  p->root = join(p, join(p, before, made), rest);
  p->count++;
}

void pairs_remove(pairs *p, pair removed) {
  uint32_t *at = &p->root;
  while (*at && (is_before(p->nodes[*at].pair, removed) || is_before(removed, p->nodes[*at].pair)))
    at = is_before(p->nodes[*at].pair, removed) ? &p->nodes[*at].right : &p->nodes[*at].left;
  uint32_t gone = *at;
  if (!gone) return;
  *at = join(p, p->nodes[gone].left, p->nodes[gone].right);
  p->nodes[gone].left = p->unused;
  p->unused = gone;
  p->count--;
}

int pairs_from(const pairs *p, pair least, pair *found) {
  int is_found = 0;
  for (uint32_t at = p->root; at;) {
    const node *n = p->nodes + at;
    int is_too_early = is_before(n->pair, least);
    if (!is_too_early) *found = n->pair;
    is_found |= !is_too_early;
    at = is_too_early ? n->right : n->left;
  }
  return is_found;
}

int pairs_before(const pairs *p, pair end, pair *found) {
  int is_found = 0;
  for (uint32_t at = p->root; at;) {
    const node *n = p->nodes + at;
    int is_early = is_before(n->pair, end);
    if (is_early) *found = n->pair;
    is_found |= is_early;
    at = is_early ? n->right : n->left;
  }
  return is_found;
}

void pairs_end(pairs *p) {
  free(p->nodes);
  *p = (pairs){0};
}
