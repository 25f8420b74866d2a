// Makes teams for callers from Python.
#include "team.h"

extern "C" nano::Team* nano_team_create(int size) { return new nano::Team(size); }

// The process must be the one that made the team, and no thread may be in a run of it.
extern "C" void nano_team_destroy(nano::Team* team) { delete team; }
