/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* dl_iterate_phdr() */
#include "intercept.h"
#include "elf.h"
#include "fork.h"
#include "ibv_tree.h"
#include "loader_gate.h"
#include "patch.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define NAMES 4
#define RANGE_NAMES 2	/* the first of them: the calls that register and release */
#define NAME_DOFORK 0
#define NAME_DONTFORK 1
#define NAME_FORK_INIT 2
#define NAME_STATUS 3

/* Releases first: a range registered here must be released here. */
static const char *const names[NAMES] = {
	"ibv_dofork_range",
	"ibv_dontfork_range",
	"ibv_fork_init",
	"ibv_is_fork_initialized",
};

/* A libibverbs in this process. */
struct copy {
	struct rf_library library;
	char soname[128];
	uintptr_t start, end;
	uintptr_t entries[NAMES];	/* its own functions */
	bool through_got[RANGE_NAMES];
	bool elsewhere;			/* one of these GOT entries named another's */
	bool found;			/* in the look under way */
	bool settled;			/* how it is served has been decided */
};

static struct {
	struct rf_lock lock;
	const struct rf_ibv_functions *ours;	/* NULL: interception is off */
	bool any;			/* a libibverbs has been seen */
	bool changing;			/* the members below */
	bool unfinished;		/* another thread is in dlopen(): look again */
	unsigned long long seen;	/* objects ever loaded and unloaded, as of the last look */
	struct copy copies[RF_LIBRARIES];
	size_t count;
} state;

static __thread bool trying __attribute__((tls_model("initial-exec")));
static __thread bool arrived __attribute__((tls_model("initial-exec")));

bool rf_intercept_is_trial(void)
{
	arrived |= trying;
	return trying;
}

static uintptr_t ours(size_t name)
{
	switch (name) {
	case NAME_DOFORK:
		return (uintptr_t)state.ours->dofork_range;
	case NAME_DONTFORK:
		return (uintptr_t)state.ours->dontfork_range;
	case NAME_FORK_INIT:
		return (uintptr_t)state.ours->fork_init;
	default:
		return (uintptr_t)state.ours->is_fork_initialized;
	}
}

/* NAMES: none of them. */
static size_t which(const char *name)
{
	size_t i = 0;

	if (strncmp(name, "ibv_", 4) != 0)
		return NAMES;
	while (i < NAMES && strcmp(name, names[i]) != 0)
		i++;
	return i;
}

/* ---- Which there are ---- */

static struct copy *add_copy(const struct rf_elf *object)
{
	struct copy *copy;
	size_t i;

	for (i = 0; i < state.count; i++) {
		copy = &state.copies[i];
		/* The program stays where it is. */
		if (copy->start == object->start &&
		    (!*object->name || !strncmp(copy->library.path, object->name,
						sizeof(copy->library.path) - 1)))
			return copy;
	}
	if (state.count == RF_LIBRARIES)
		return NULL;
	copy = &state.copies[state.count++];
	memset(copy, 0, sizeof(*copy));
	copy->start = object->start;
	copy->end = object->end;
	rf_elf_path(object->name, copy->library.path, sizeof(copy->library.path));
	snprintf(copy->soname, sizeof(copy->soname), "%s", object->soname);
	for (i = 0; i < NAMES; i++)
		copy->entries[i] = rf_elf_find(object, names[i]);
	return copy;
}

/* False too for an object that holds an engine, any engine: its calls stay its own. */
static bool read_foreign(struct rf_elf *object, const struct dl_phdr_info *info)
{
	return rf_elf_read(object, info) && !rf_elf_find(object, "rf_abi");
}

/* An object that is not relocated yet is left alone, and looked at again later. */
static bool is_relocated(const struct rf_elf *object)
{
	bool relocated = rf_elf_is_relocated(object);

	state.unfinished |= !relocated;
	return relocated;
}

static int find_copy(struct dl_phdr_info *info, size_t size, void *unused)
{
	struct rf_elf object;
	const char *name = NULL;
	struct copy *copy;
	uintptr_t *got;
	size_t i, at = 0;

	(void)size, (void)unused;
	if (!read_foreign(&object, info) || !rf_elf_find(&object, names[NAME_DONTFORK]) ||
	    !is_relocated(&object))
		return 0;
	copy = add_copy(&object);
	if (!copy)
		return 0;
	copy->found = true;
	if (copy->settled)
		return 0;
	copy->elsewhere = false;
	while ((got = rf_elf_next_got(&object, &at, &name))) {
		i = which(name);
		if (i >= RANGE_NAMES)
			continue;
		copy->through_got[i] = true;
		copy->elsewhere |= __atomic_load_n(got, __ATOMIC_RELAXED) != ours(i);
	}
	return 0;
}

static void find_copies(void)
{
	size_t i, kept = 0;

	for (i = 0; i < state.count; i++)
		state.copies[i].found = false;
	dl_iterate_phdr(find_copy, NULL);
	for (i = 0; i < state.count; i++)
		if (state.copies[i].found)
			state.copies[kept++] = state.copies[i];
	state.count = kept;
	if (kept)
		__atomic_store_n(&state.any, true, __ATOMIC_RELAXED);
}

/* ---- The way to take each ---- */

/*
 * Does it mark memory itself? Its marks and ours would take each other away, and data
 * be lost where the kernel does not copy. Not if its calls have come here from the first,
 * whoever has called its ibv_fork_init() by another way.
 */
static int tracks_itself(const struct copy *copy, bool forking)
{
	if (copy->through_got[NAME_DOFORK] && copy->through_got[NAME_DONTFORK] &&
	    !copy->elsewhere)
		return 0;
	return rf_ibv_tree_is_used(copy->entries[NAME_DONTFORK], copy->entries[NAME_STATUS],
				   forking);
}

static bool arrives(uintptr_t entry)
{
	int (*range)(void *, size_t);

	memcpy(&range, &entry, sizeof(range));
	arrived = false;
	trying = true;
	(void)range(NULL, 0);
	trying = false;
	return arrived;
}

static bool is_patched(const struct copy *copy)
{
	size_t i;

	for (i = 0; i < RANGE_NAMES; i++)
		if (!copy->through_got[i] && !rf_patch_leads(copy->entries[i], ours(i)))
			return false;
	return true;
}

/* They are open. */
static int apply(const struct copy *copy, const struct rf_patch *patches)
{
	size_t i, done;
	int rc = 0;

	for (done = 0; rc >= 0 && done < RANGE_NAMES; done++) {
		if (copy->through_got[done])
			continue;
		rc = rf_patch_apply(&patches[done]);
		if (rc >= 0 && !arrives(copy->entries[done]))
			rc = -EBUSY;
	}
	for (i = 0; rc < 0 && i < done; i++)
		if (!copy->through_got[i])
			rf_patch_undo(&patches[i]);
	return rc;
}

static int patch(const struct copy *copy)
{
	struct rf_patch patches[RANGE_NAMES];
	size_t i, opened;
	int rc = 0;

	if (is_patched(copy))
		return 0;
	for (i = 0; rc >= 0 && i < RANGE_NAMES; i++)
		if (!copy->through_got[i])
			rc = rf_patch_plan(&patches[i], copy->entries[i], ours(i));
	if (rc < 0)
		return rc;
	for (opened = 0; rc >= 0 && opened < RANGE_NAMES; opened++)
		if (!copy->through_got[opened])
			rc = rf_patch_open(&patches[opened]);
	if (rc >= 0)
		rc = apply(copy, patches);
	for (i = 0; i < opened; i++)
		if (!copy->through_got[i])
			rf_patch_shut(&patches[i]);
	return rc;
}

/* By SELinux or seccomp, say. */
static const char forbidden[] = "this process is not allowed to change its code";

static const char *why_not_patched(int rc)
{
	if (rc == -ENOTSUP)
		return "it calls its range functions directly, on a machine that is not x86-64";
	if (rc == -ENOEXEC)
		return "it calls its range functions directly, and rdmafork does not recognize "
		       "their code";
	return forbidden;
}

static void settle(struct copy *copy, bool forking)
{
	struct rf_library *library = &copy->library;
	size_t i;
	int rc = tracks_itself(copy, forking);

	copy->settled = rc >= 0;
	library->how = rc ? RF_LIBRARY_REFUSED : RF_LIBRARY_OURS; /* until a GOT entry says else */
	library->why = rc ? "its own fork support already protects memory" : NULL;
	library->protects = rc != 0;
	if (rc)
		return;
	for (i = 0; i < RANGE_NAMES && copy->through_got[i]; i++)
		;
	if (i == RANGE_NAMES)
		return;
	rc = copy->entries[NAME_DOFORK] ? patch(copy) : -ENOEXEC;
	library->how = rc < 0 ? RF_LIBRARY_REFUSED : RF_LIBRARY_PATCHED;
	if (rc < 0)
		library->why = why_not_patched(rc);
}

/* ---- The GOT ---- */

static struct copy *copy_at(uintptr_t address)
{
	size_t i;

	for (i = 0; i < state.count; i++)
		if (state.copies[i].start <= address && address < state.copies[i].end)
			return &state.copies[i];
	return NULL;
}

static bool all_are_served(void)
{
	size_t i;

	for (i = 0; i < state.count; i++)
		if (state.copies[i].library.how == RF_LIBRARY_REFUSED)
			return false;
	return true;
}

/* May a GOT entry with @value be changed? It is @copy's, or, with NULL, another object's. */
static bool may_rewrite(const struct rf_elf *object, const struct copy *copy, uintptr_t value)
{
	if (!copy)
		copy = copy_at(value);
	if (copy)
		return copy->library.how != RF_LIBRARY_REFUSED;
	/* Not bound yet, it points into its own object: the first call may bind it to any copy. */
	return object->start <= value && value < object->end && all_are_served();
}

/* Objects whose read-only GOT can be written just now, by their first address. */
#define OPENED 128

struct opened {
	uintptr_t starts[OPENED];
	size_t count;
	size_t last;	/* of the names whose GOT entries are rewritten now */
};

static bool is_open(const struct opened *opened, const struct rf_elf *object)
{
	size_t i;

	for (i = 0; i < opened->count; i++)
		if (opened->starts[i] == object->start)
			return true;
	return false;
}

static int open_object(struct opened *opened, const struct rf_elf *object)
{
	int rc;

	rc = opened->count < OPENED ? rf_elf_open(object) : -ENOMEM;
	if (rc >= 0)
		opened->starts[opened->count++] = object->start;
	return rc;
}

/* The next GOT entry of @object that is to be rewritten, in @copy or where no libibverbs is. */
static uintptr_t *next_to_rewrite(const struct rf_elf *object, const struct opened *opened,
				  const struct copy *copy, size_t *at, size_t *i)
{
	const char *name = NULL;
	uintptr_t *got, value;

	while ((got = rf_elf_next_got(object, at, &name))) {
		*i = which(name);
		if (*i == NAMES)
			continue;
		value = __atomic_load_n(got, __ATOMIC_RELAXED);
		if (rf_elf_is_raw(object, value)) {
			/* Bound to nothing, or not yet. */
			if (!is_open(opened, object))
				(void)is_relocated(object);
			continue;
		}
		if (value != ours(*i) && may_rewrite(object, copy, value))
			return got;
	}
	return NULL;
}

/* A libibverbs of which not all calls can be taken over is refused. */
static int open_got(struct dl_phdr_info *info, size_t size, void *data)
{
	struct opened *opened = data;
	struct rf_elf object;
	struct copy *copy, *called;
	uintptr_t *got;
	size_t i, at = 0;

	(void)size;
	if (!read_foreign(&object, info))
		return 0;
	copy = copy_at(object.start);
	while ((got = next_to_rewrite(&object, opened, copy, &at, &i))) {
		if (!rf_elf_is_read_only(&object, got) || is_open(opened, &object) ||
		    !is_relocated(&object) || open_object(opened, &object) >= 0)
			continue;
		called = copy ? copy : copy_at(__atomic_load_n(got, __ATOMIC_RELAXED));
		/* Callers of a patched function already reach us. */
		if (i >= RANGE_NAMES || !called ||
		    (!copy && called->library.how == RF_LIBRARY_PATCHED))
			continue;
		called->library.how = RF_LIBRARY_REFUSED;
		called->library.why = forbidden;
	}
	return 0;
}

static int rewrite_got(struct dl_phdr_info *info, size_t size, void *data)
{
	const struct opened *opened = data;
	struct rf_elf object;
	struct copy *copy;
	uintptr_t *got;
	size_t i, at = 0;

	(void)size;
	if (!read_foreign(&object, info))
		return 0;
	copy = copy_at(object.start);
	while ((got = next_to_rewrite(&object, opened, copy, &at, &i))) {
		if (i > opened->last ||
		    (rf_elf_is_read_only(&object, got) && !is_open(opened, &object)))
			continue;
		__atomic_store_n(got, ours(i), __ATOMIC_RELEASE);
		if (copy && copy->library.how == RF_LIBRARY_OURS && i < RANGE_NAMES)
			copy->library.how = RF_LIBRARY_REWRITTEN;
	}
	return 0;
}

static int shut_got(struct dl_phdr_info *info, size_t size, void *data)
{
	struct rf_elf object;

	(void)size;
	if (rf_elf_read(&object, info) && is_open(data, &object))
		(void)rf_elf_shut(&object);
	return 0;
}

/* In a callback, as the loader's lock is held there: no object comes or goes meanwhile. */
static int rewrite_all(struct dl_phdr_info *info, size_t size, void *unused)
{
	struct opened opened = { .count = 0 };

	(void)info, (void)size, (void)unused;
	dl_iterate_phdr(open_got, &opened);
	opened.last = NAME_DOFORK;
	dl_iterate_phdr(rewrite_got, &opened);
	opened.last = NAMES - 1;
	dl_iterate_phdr(rewrite_got, &opened);
	dl_iterate_phdr(shut_got, &opened);
	return 1;
}

/* An object that needs the libibverbs, if one names it. */
static int name_user(struct dl_phdr_info *info, size_t size, void *data)
{
	struct copy *copy = data;
	struct rf_elf object;

	(void)size;
	if (!*copy->soname || !rf_elf_read(&object, info) ||
	    !rf_elf_needs(&object, copy->soname))
		return 0;
	rf_elf_path(object.name, copy->library.user, sizeof(copy->library.user));
	return 1;
}

/* ---- All of it ---- */

static int count_loaded(struct dl_phdr_info *info, size_t size, void *data)
{
	(void)size;
	*(unsigned long long *)data = info->dlpi_adds + info->dlpi_subs;
	return 1;
}

/* A libibverbs may have been unloaded and loaded again at the same address. */
static bool is_as_it_was(const struct copy *copy)
{
	if (!copy->settled || copy->library.how == RF_LIBRARY_REFUSED)
		return false;
	return copy->library.how != RF_LIBRARY_PATCHED || is_patched(copy);
}

/* In a callback, as above: a libibverbs being read, its code too, stays where it is. */
static int serve_all(struct dl_phdr_info *info, size_t size, void *unused)
{
	size_t i;

	find_copies();
	for (i = 0; i < state.count; i++) {
		if (is_as_it_was(&state.copies[i]))
			continue;
		settle(&state.copies[i], true);
		dl_iterate_phdr(name_user, &state.copies[i]);
	}
	return state.count ? rewrite_all(info, size, unused) : 1;
}

/* Ask the others. They may allocate memory for it, so the loader's lock is not held. */
static void ask_all(void)
{
	bool asked = false;
	size_t i;

	for (i = 0; i < state.count; i++) {
		if (state.copies[i].settled)
			continue;
		settle(&state.copies[i], false);
		asked = true;
	}
	if (asked)
		dl_iterate_phdr(rewrite_all, NULL);
}

static void look_at_all(bool forking)
{
	unsigned long long loaded = 0;
	bool settled = true;
	size_t i;

	dl_iterate_phdr(count_loaded, &loaded);
	if (loaded == state.seen)
		return;
	state.changing = true;
	state.unfinished = false;
	dl_iterate_phdr(serve_all, NULL);
	if (!forking)
		ask_all();
	for (i = 0; i < state.count; i++)
		settled = settled && state.copies[i].settled;
	state.seen = settled && !state.unfinished ? loaded : 0;
	state.changing = false;
}

/* Unless another thread forks. */
static void look(bool forking)
{
	if (!rf_loader_gate_try())
		return;
	look_at_all(forking);
	rf_loader_gate_leave();
}

static void switch_on(const struct rf_ibv_functions *ours)
{
	__atomic_store_n(&state.ours, ours, __ATOMIC_RELAXED);
	rf_loader_gate_enter();
	look_at_all(false);
	rf_loader_gate_leave();
}

void rf_intercept_look(bool forking)
{
	/* The thread that has the lock is looking. */
	if (!__atomic_load_n(&state.ours, __ATOMIC_RELAXED) || !rf_lock_try(&state.lock))
		return;
	look(forking);
	rf_lock_drop(&state.lock);
}

static int enter(void)
{
	do {
		if (!rf_notice_child() || rf_lock_is_mine(&state.lock))
			return -EDEADLK;
	} while (!rf_lock_try(&state.lock) && !rf_lock_wait(&state.lock));
	return 0;
}

void rf_intercept_begin(const struct rf_ibv_functions *ours)
{
	__atomic_store_n(&state.ours, ours, __ATOMIC_RELAXED);
	/* Before its own constructors a libibverbs is asked nothing. */
	rf_intercept_look(true);
}

bool rf_intercept_any(void)
{
	return __atomic_load_n(&state.any, __ATOMIC_RELAXED);
}

int rf_intercept_forward(const struct rf_ibv_functions *ours)
{
	uintptr_t entries[RF_LIBRARIES];
	size_t i, count = 0;
	int (*fork_init)(void);
	int rc;

	/* Called by itself, while it looks: a libibverbs is asked for its status. */
	if (enter() < 0)
		return 0;
	switch_on(ours);
	for (i = 0; i < state.count; i++)
		if (state.copies[i].library.how == RF_LIBRARY_REFUSED &&
		    state.copies[i].entries[NAME_FORK_INIT])
			entries[count++] = state.copies[i].entries[NAME_FORK_INIT];
	rf_lock_drop(&state.lock);
	for (i = 0, rc = 0; i < count && !rc; i++) {
		memcpy(&fork_init, &entries[i], sizeof(fork_init));
		rc = fork_init();
	}
	return rc;
}

void rf_intercept_child(void)
{
	if (!__atomic_load_n(&state.lock.word, __ATOMIC_ACQUIRE) || rf_lock_is_mine(&state.lock))
		return;
	/* The thread that looked is not in this process, and may have stopped anywhere. */
	if (state.changing) {
		state.count = 0;
		state.seen = 0;
		state.changing = false;
	}
	__atomic_store_n(&state.lock.word, 0, __ATOMIC_RELEASE);
}

RF_API const char *rf_library_how_name(uint8_t how)
{
	static const char *const hows[] = { "ours", "rewritten", "patched", "refused" };

	return how <= RF_LIBRARY_REFUSED ? hows[how] : NULL;
}

int rf_intercept_all(const struct rf_ibv_functions *ours, struct rf_error *error)
{
	int served = 0, rc = enter();
	size_t i;

	*error = (struct rf_error){ .cause = RF_CAUSE_SIGNAL };
	if (rc < 0)
		return rc;
	error->cause = RF_CAUSE_NONE;
	switch_on(ours);
	for (i = 0; i < state.count; i++) {
		const struct rf_library *library = &state.copies[i].library;

		if (library->how != RF_LIBRARY_REFUSED) {
			served++;
		} else if (error->cause == RF_CAUSE_NONE) {
			error->cause = RF_CAUSE_LIBRARY;
			snprintf(error->text, sizeof(error->text), "%.100s (loaded for %.60s): %s",
				 library->path,
				 *library->user ? library->user : "an unknown object",
				 library->why);
		}
	}
	rf_lock_drop(&state.lock);
	return error->cause == RF_CAUSE_LIBRARY ? -ENOTSUP : served;
}

RF_API ssize_t rf_libraries(struct rf_library *out, size_t capacity)
{
	ssize_t count;
	size_t i;

	if (enter() < 0)
		return -EDEADLK;
	if (state.ours)
		look(false);
	for (i = 0; i < state.count && i < capacity; i++)
		out[i] = state.copies[i].library;
	count = (ssize_t)state.count;
	rf_lock_drop(&state.lock);
	return count;
}
