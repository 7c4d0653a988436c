"""The naive truth about pages, registrations and children, to hold the engine against.

A page is what the kernel maps at once: 4 KiB, or 2 MiB in hugetlb. The rules:

- A page is *absent* from a child (``dc`` in VmFlags) when a registration covers it.
- A huge page is covered by any byte registered in it. A base page is covered when one
  registration fills it, or, with whole edges, by any byte registered in it.
- Shared memory is always *present*: fork() does not move it.
- All else is *present*: the child keeps what it owns.
- Of an absent page the child is *given back* the base pages on which a byte was not
  registered.
- Eager, and for memory that nobody holds, this is true as soon as registering returns;
  lazy, for held memory, from the next fork on, and not earlier. (Before a fork nobody
  can see whether shared memory bears a mark, nor what is left of huge pages at the ends
  of held memory: either will do.)
- What is wiped bears another mark (``wf``) by the same rules, but at once in either mode, and
  is refused of shared memory. What is kept bears none. Of bytes that nobody omits or wipes a
  child finds what the parent has.
- Held memory stays as it is. Memory that nobody holds may be unmapped, and something
  else be mapped there, while it is registered. Such a registration says nothing about
  the newcomer: it may be marked by way of another, *either* will do. So it is with a page
  moved while it was registered: the kernel takes the mark along, and tells nobody.
"""

from typing import NamedTuple

PAGE = 4096

ABSENT, PRESENT, EITHER = "absent", "present", "either"


class Page(NamedTuple):
    nbytes: int
    shared: bool
    born: int
    moved: bool = False  # here by mremap(), registered where it came from


class Registration(NamedTuple):
    start: int
    end: int
    held: bool
    made: int
    reach: tuple  # first and last address of the pages it touched when it was made
    on_fork: str = "omit"


class Model:
    def __init__(self, lazy, whole):
        self.lazy = lazy
        self.whole = whole
        self.pages = {}  # address: Page; where there is none, nothing is mapped
        self.registrations = {}  # key: Registration
        self.now = 0
        self.forked = 0  # when the last fork was

    # ---- what happens --------------------------------------------------------------

    def tick(self):
        self.now += 1
        return self.now

    def map(self, start, nbytes, shared, page_nbytes=PAGE):
        self.unmap(start, nbytes)
        born = self.tick()
        for address in range(start, start + nbytes, page_nbytes):
            self.pages[address] = Page(page_nbytes, shared, born)

    def unmap(self, start, nbytes):
        for address in self.pages_in(start, start + nbytes):
            del self.pages[address]

    def move(self, start, to):
        """One base page to another address."""
        page = self.pages.pop(start)
        registered = any(r.start < start + PAGE and start < r.end for r in self.all())
        # A mark from before it was unmapped and mapped there may still be underway, too.
        stale = any(self.is_stale_near(r, start, page) for r in self.all())
        moved = page.moved or registered or stale
        self.pages[to] = Page(PAGE, page.shared, self.tick(), moved)

    def register(self, key, start, end, held, on_fork="omit"):
        """False if it is to be refused: not mapped, not to be wiped, or nothing copies it."""
        if on_fork == "wipe" and self.is_shared(start, end):
            return False
        if on_fork == "keep" and self.whole and not self.is_all_shared(start, end):
            return False
        waits = on_fork == "keep" or (self.lazy and held and on_fork == "omit")
        if not waits and self.has_hole(start, end):
            return False
        touched = self.pages_in(start, end)
        reach = (
            min([start & -PAGE, *touched]),
            max([end + -end % PAGE, *[a + self.pages[a].nbytes for a in touched]]),
        )
        self.registrations[key] = Registration(start, end, held, self.tick(), reach, on_fork)
        return True

    def release(self, key):
        del self.registrations[key]

    def fork(self):
        self.forked = self.tick()

    # ---- what is true ---------------------------------------------------------------

    def all(self):
        return self.registrations.values()

    def pages_in(self, start, end):
        """The mapped pages [start, end) touches."""
        if end - start <= 64 * PAGE:
            huge = [a for a in self.huge_addresses(start, end) if a in self.pages]
            base = range(start & -PAGE, end, PAGE)
            return sorted({*huge, *[a for a in base if a in self.pages]})
        return sorted(a for a, p in self.pages.items() if a < end and start < a + p.nbytes)

    def huge_addresses(self, start, end):
        """Where huge pages would begin that [start, end) touches."""
        huge = 512 * PAGE
        return [
            address
            for address in range(start & -huge, end, huge)
            if address in self.pages and self.pages[address].nbytes == huge
        ]

    def is_mapped(self, start, end):
        at = start
        for address in self.pages_in(start, end) if start < end else []:
            if address > at:
                return False
            at = address + self.pages[address].nbytes
        return at >= end

    def to_mark(self, start, end):
        """The base pages to be marked, as they are tried first."""
        if self.whole:
            return start & -PAGE, end + -end % PAGE
        return start + -start % PAGE, end & -PAGE

    def has_hole(self, start, end):
        """Is nothing mapped at one of them?"""
        return not self.is_mapped(*self.to_mark(start, end))

    def is_shared(self, start, end):
        """Is one of them shared?"""
        return any(self.pages[a].shared for a in self.pages_in(*self.to_mark(start, end)))

    def is_all_shared(self, start, end):
        shared = all(self.pages[a].shared for a in self.pages_in(start, end))
        return shared and self.is_mapped(start, end)

    def is_certain(self):
        """All registered pages are those that were registered."""
        return all(self.is_mapped(*r.reach) for r in self.all()) and all(
            self.touching(address)[1] for address in self.pages
        )

    def touches(self, registration, address, page):
        return registration.start < address + page.nbytes and address < registration.end

    def covers(self, registration, address, page):
        if self.whole or page.nbytes > PAGE:
            return self.touches(registration, address, page)
        return registration.start <= address and address + page.nbytes <= registration.end

    def is_stale_near(self, registration, address, page):
        """It speaks of what was mapped there before."""
        first, last = registration.reach
        if registration.on_fork == "keep":
            return False
        return registration.made < page.born and first < address + page.nbytes and address < last

    def is_in_force(self, registration):
        waits = self.lazy and registration.held and registration.on_fork == "omit"
        return not waits or registration.made < self.forked

    def verdict(self, address, forked=True, on_fork="omit"):
        """Must the page be absent from a child or present, going by the marks on it?

        forked: a fork has just been, and nothing since. on_fork: "omit" or "wipe", which mark.
        """
        page = self.pages[address]
        if page.shared:
            certain = forked or on_fork == "wipe"
            return PRESENT if certain and not page.moved else EITHER
        fresh = [
            r
            for r in self.all()
            if r.on_fork == on_fork and r.made > page.born and self.covers(r, address, page)
        ]
        in_force = [r for r in fresh if self.is_in_force(r)]
        if in_force:
            lagging = page.nbytes > PAGE and not self.whole and not forked
            return EITHER if lagging and all(r.held for r in in_force) else ABSENT
        if page.moved or any(self.is_stale_near(r, address, page) for r in self.all()):
            return EITHER
        return PRESENT

    def is_given_back(self, address, base):
        """Has a child this base page of an absent page again? None: either will do."""
        page = self.pages[address]
        _, certain = self.touching(address)
        if not certain:
            return None
        if page.nbytes == PAGE and not self.whole:
            return False
        return not all(self.taken(base))

    def taken(self, base):
        """Of each byte of a base page: does a registration omit or wipe it?"""
        taken = bytearray(PAGE)
        for r in self.all():
            first, last = max(r.start, base) - base, min(r.end, base + PAGE) - base
            if r.on_fork != "keep" and first < last:
                taken[first:last] = b"\1" * (last - first)
        return taken

    def inherited(self, address, tag):
        """Is it sure what a child finds on a base page full of tag? And what; None: no page."""
        omitted = self.verdict(address)
        wiped = self.verdict(address, on_fork="wipe")
        if EITHER in (omitted, wiped) or not self.touching(address)[1]:
            return False, None
        if ABSENT not in (omitted, wiped):
            return True, bytes([tag]) * PAGE
        taken = self.taken(address) if self.whole else bytearray(b"\1" * PAGE)
        if omitted == ABSENT and all(taken):
            return True, None
        return True, bytes(0 if t else tag for t in taken)

    def touching(self, address):
        """How many registrations touch the page, and whether all were made of it."""
        page = self.pages[address]
        touching = [r for r in self.all() if self.touches(r, address, page)]
        stale = page.moved or any(self.is_stale_near(r, address, page) for r in self.all())
        return len(touching), not stale
