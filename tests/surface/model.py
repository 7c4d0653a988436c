"""The naive truth about pages, registrations and children, to hold the engine against.

A page is what the kernel maps at once: 4 KiB, or 2 MiB in hugetlb. The rules:

- A registration counts on a page (``dc`` or ``wf`` in VmFlags keep it from children) when it
  fills the page. On a huge page, and where the kernel's copying is not trusted, it counts by
  any byte on it. ``on_fork="keep"`` counts nowhere.
- A child finds on a page that bears a mark: nothing, if one registration to omit fills the page;
  else zeros, if one to wipe fills it; else a copy. Of all other pages it has what the kernel gives.
- Shared memory is always *present*, and bears no mark: fork() does not move it.
- Eager, and for memory that nobody holds, the page bears a mark as soon as registering returns;
  lazy, for held memory, from the next fork on, and not earlier. (Before a fork nobody can see
  whether shared memory bears a mark, nor what is left of huge pages at the ends of held memory:
  either will do.)
- The mark is ``wf`` where a child finds zeros of private anonymous base pages, else ``dc``. A
  fork exchanges one for the other, not a registration; and need not do so where memory that
  nobody held has been registered.
- Held memory stays as it is. Memory that nobody holds may be unmapped, and something
  else be mapped there, while it is registered. Such a registration says nothing about
  the newcomer: it may be marked by way of another, *either* will do. So it is with a page
  moved while it was registered: the kernel takes the mark along, and tells nobody.
"""

from typing import NamedTuple

PAGE = 4096

ABSENT, PRESENT, EITHER = "absent", "present", "either"  # marked, unmarked, either will do


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
        self.doubted = set()  # addresses of registered pages that at some time were not held
        self.now = 0
        self.forked = 0  # when the last fork was

    # ---- operations ----------------------------------------------------------------

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
        """False if it is to be refused: not mapped, or nothing copies it."""
        if on_fork == "keep" and self.whole and not self.is_all_shared(start, end):
            return False
        waits = on_fork == "keep" or (self.lazy and held)
        if not waits and self.has_hole(start, end):
            return False
        touched = self.pages_in(start, end)
        reach = (
            min([start & -PAGE, *touched]),
            max([end + -end % PAGE, *[a + self.pages[a].nbytes for a in touched]]),
        )
        self.registrations[key] = Registration(start, end, held, self.tick(), reach, on_fork)
        if not held:
            self.doubted.update(range(*reach, PAGE))
        return True

    def release(self, key):
        released = self.registrations.pop(key)
        reaches = [r.reach for r in self.all() if r.on_fork != "keep"]
        for address in self.doubted & set(range(*released.reach, PAGE)):
            if not any(first <= address < last for first, last in reaches):
                self.doubted.discard(address)

    def fork(self):
        self.forked = self.tick()

    # ---- the rules ------------------------------------------------------------------

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

    def is_all_shared(self, start, end):
        shared = all(self.pages[a].shared for a in self.pages_in(start, end))
        return shared and self.is_mapped(start, end)

    def is_certain(self):
        """Marks and facts of all registered pages are as the registrations say."""
        return all(self.is_mapped(*r.reach) for r in self.all()) and all(
            self.touching(address)[1] for address in self.pages
        )

    def touches(self, registration, address, page):
        return registration.start < address + page.nbytes and address < registration.end

    def fills(self, registration, address, page):
        return registration.start <= address and address + page.nbytes <= registration.end

    def covers(self, registration, address, page):
        """Does it count there?"""
        if registration.on_fork == "keep":
            return False
        if self.whole or page.nbytes > PAGE:
            return self.touches(registration, address, page)
        return self.fills(registration, address, page)

    def is_stale_near(self, registration, address, page):
        """Does it speak of memory that was mapped there before?"""
        first, last = registration.reach
        if registration.on_fork == "keep":
            return False
        return registration.made < page.born and first < address + page.nbytes and address < last

    def is_in_force(self, registration):
        return not (self.lazy and registration.held) or registration.made < self.forked

    def counting(self, address):
        """The registrations that count on a page as it is now."""
        page = self.pages[address]
        return [r for r in self.all() if r.made > page.born and self.covers(r, address, page)]

    def verdict(self, address, forked=True):
        """Must the page bear a mark, and so be absent from a child or a copy of ours there?

        forked: a fork has just been, and nothing since.
        """
        page = self.pages[address]
        if page.shared:
            return PRESENT if forked and not page.moved else EITHER
        in_force = [r for r in self.counting(address) if self.is_in_force(r)]
        if in_force:
            lagging = page.nbytes > PAGE and not self.whole and not forked
            return EITHER if lagging and all(r.held for r in in_force) else ABSENT
        if page.moved or any(self.is_stale_near(r, address, page) for r in self.all()):
            return EITHER
        return PRESENT

    def finds(self, address):
        """What a child finds on a page, going by those that count: a wish, or "keep" for a copy."""
        page = self.pages[address]
        filling = {r.on_fork for r in self.counting(address) if self.fills(r, address, page)}
        return next((wish for wish in ("omit", "wipe") if wish in filling), "keep")

    def allowed_marks(self, address, forked=True):
        """Of a page that bears a mark: which it may be."""
        page = self.pages[address]
        if page.moved:
            return {"dc", "wf", "dcwf"}  # one of them is underway with it
        wiped = any(r.on_fork == "wipe" and self.fills(r, address, page) for r in self.all())
        if page.nbytes > PAGE or not wiped:
            return {"dc"}
        if not forked or address in self.doubted or not self.touching(address)[1]:
            return {"dc", "wf"}
        return {"wf"} if self.finds(address) == "wipe" else {"dc"}

    def inherited(self, address, tag):
        """Is it sure what a child finds on a base page full of tag? And what; None: no page."""
        verdict, copy = self.verdict(address), bytes([tag]) * PAGE
        if verdict == EITHER or not self.touching(address)[1]:
            return False, None
        if verdict == PRESENT:
            return True, copy
        return True, {"omit": None, "wipe": bytes(PAGE), "keep": copy}[self.finds(address)]

    def touching(self, address):
        """How many registrations touch the page, and whether all were made of it."""
        page = self.pages[address]
        touching = [r for r in self.all() if self.touches(r, address, page)]
        stale = page.moved or any(self.is_stale_near(r, address, page) for r in self.all())
        return len(touching), not stale
