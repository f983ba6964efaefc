"""Published pages by the tokens that they hold: a radix tree over whole pages.

A node is a run of pages between which nothing branches, is pinned or ends. It is found under its parent by
the very tokens of its first page, and matched by those of all its pages, so two texts never meet in one
page by a collision. What a request does to a prefix, it does to one node or a few, not to each page.

A node is split where a text leaves it, or a pin or a text that is published ends in it. Nodes are not merged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.errors import EngineFault
from engine.request import Tokens

Pages = tuple[int, ...]
_OBJECT_TOKENS = 1 << 20  # of texts that are found by their identity


class Node:
    """`pages` that hold `text`, and `chain`, all pages from the root to their last: empty once evicted.

    `holds` counts the pins on the last page and the children that are held: all pages of a node are held
    as long as it is above 0.
    """

    __slots__ = ("chain", "children", "holds", "pages", "parent", "text")

    def __init__(self, parent: Node | None, pages: Pages, text: Tokens, chain: Pages) -> None:
        self.parent = parent
        self.pages = pages
        self.text = text
        self.chain = chain
        self.children: dict[Tokens, Node] = {}
        self.holds = 0


class PrefixTree:
    """Which pages hold which prefix, who holds them, and which of the others were not used for longest."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.version = 0  # changes whenever a match may come out differently
        self.node_of: dict[int, Node] = {}  # of every published page
        self.evictable = 0  # pages that nobody holds
        self._root: dict[Tokens, Node] = {}
        # Nodes that nobody holds, least recently used first. A node comes before those that its tokens
        # follow, so that the first one never has children.
        self._unheld: OrderedDict[Node, None] = OrderedDict()
        self._objects = _Objects()

    def match(self, tokens: Tokens, most: int) -> Pages:
        """The longest chain of published pages, at most `most`, that `tokens` begins with."""
        size, limit = self.page_tokens, min(most, len(tokens) // self.page_tokens)
        chain: Pages = ()
        children, at = self._root, 0
        while at < limit:
            node = children.get(tokens[at * size : (at + 1) * size])
            if node is None:
                break
            shared = self._shared(node, tokens, at, limit)
            chain, at, children = node.chain, at + shared, node.children
            if shared < len(node.pages):
                return chain[:at]
        return chain

    def match_all(self, texts: Sequence[Tokens], most: list[int]) -> list[Pages]:
        """`match` of each of `texts`, which are likely to come again as the same objects."""
        nodes = list(map(self._objects.nodes.get, map(id, texts)))
        chains = [() if node is None else node.chain for node in nodes]
        if list(map(len, chains)) != most:
            root, size = self._root, self.page_tokens
            for index, (text, limit) in enumerate(zip(texts, most, strict=True)):
                if len(chains[index]) == limit:
                    continue
                if text[:size] not in root:  # as most are that nobody asked for before
                    chains[index] = ()
                    continue
                chains[index] = self.match(text, limit)
                self._note(text, chains[index])
        return chains

    def _note(self, text: Tokens, chain: Pages) -> None:
        """Remembers where a text is found, if all its whole pages end where a node does."""
        if chain and len(chain) == len(text) // self.page_tokens:
            node = self.node_of[chain[-1]]
            if node.chain == chain:
                self._objects.add(text, node)

    def _shared(self, node: Node, tokens: Tokens, at: int, limit: int) -> int:
        """How many pages of `node`, the first of which holds page `at` of `tokens`, hold these up to page
        `limit`."""
        size, pages = self.page_tokens, min(len(node.pages), limit - at)
        begin = at * size
        if tokens[begin : begin + pages * size] == (
            node.text if pages == len(node.pages) else node.text[: pages * size]
        ):
            return pages
        shared = 1
        while (
            tokens[begin + shared * size : begin + (shared + 1) * size]
            == node.text[shared * size : (shared + 1) * size]
        ):
            shared += 1
        return shared

    def held_part(self, chain: Pages) -> int:
        """How many leading pages of a matched chain somebody holds."""
        node = self.node_of[chain[-1]] if chain else None
        while node is not None:
            if node.holds:
                return min(len(node.chain), len(chain))
            node = node.parent
        return 0

    def pin(self, chains: Iterable[Pages]) -> None:
        """Holds every page of each chain, as it was matched a moment ago."""
        node_of, unheld = self.node_of, self._unheld
        for chain in chains:
            if not chain:
                continue
            last = node_of[chain[-1]]
            node: Node | None = last
            if len(last.chain) != len(chain):
                node = self._split(last, len(last.chain) - len(chain))
            while node is not None:
                node.holds += 1
                if node.holds > 1:  # held already, and what is before it
                    break
                del unheld[node]
                self.evictable -= len(node.pages)
                node = node.parent

    def unpin(self, chains: Iterable[Pages]) -> None:
        """Takes one pin from each chain. What nobody holds any more is evictable, its last page first."""
        node_of, unheld = self.node_of, self._unheld
        for chain in chains:
            node: Node | None = node_of[chain[-1]] if chain else None
            while node is not None:
                node.holds -= 1
                if node.holds:
                    break
                unheld[node] = None
                self.evictable += len(node.pages)
                node = node.parent

    def publish(self, tokens: Tokens, pages: Sequence[int]) -> tuple[Pages, list[int]]:
        """Takes in `pages`, which hold the whole pages of `tokens` from its start.

        Returns those of them that are published as of now, and those whose tokens another page holds: a
        page that is published already as it stands here is neither.
        """
        size = self.page_tokens
        known: list[int] = []
        new: Pages = ()
        node: Node | None = None
        children = self._root
        while len(known) < len(pages):
            at = len(known)
            following = children.get(tokens[at * size : (at + 1) * size])
            if following is None:
                new = tuple(pages[at:])
                node = self._add(node, new, tokens[at * size : len(pages) * size])
                break
            shared = self._shared(following, tokens, at, len(pages))
            node = following
            if shared < len(following.pages):
                node = self._split(following, len(following.pages) - shared)
            known += node.pages
            children = node.children
        self._touch(node)
        return new, [page for page, there in zip(pages, known, strict=False) if page != there]

    def _add(self, parent: Node | None, pages: Pages, text: Tokens) -> Node:
        node = Node(parent, pages, text, pages if parent is None else parent.chain + pages)
        siblings = self._root if parent is None else parent.children
        siblings[text[: self.page_tokens]] = node
        self.node_of.update(dict.fromkeys(pages, node))
        self._unheld[node] = None
        self.evictable += len(pages)
        self.version += 1
        return node

    def _split(self, node: Node, cut: int) -> Node:
        """Takes the last `cut` pages from a node. It keeps them, so that whoever knows it by its end does
        still; the others are a new node, which is returned and counts as used just now."""
        kept = len(node.pages) - cut
        tokens = kept * self.page_tokens
        upper = Node(node.parent, node.pages[:kept], node.text[:tokens], node.chain[: len(node.chain) - cut])
        siblings = self._root if upper.parent is None else upper.parent.children
        siblings[upper.text[: self.page_tokens]] = upper
        node.parent, node.pages, node.text = upper, node.pages[kept:], node.text[tokens:]
        upper.children[node.text[: self.page_tokens]] = node
        self.node_of.update(dict.fromkeys(upper.pages, upper))
        if node.holds:
            upper.holds = 1
        else:
            self._unheld[upper] = None
        return upper

    def _touch(self, node: Node | None) -> None:
        """Pages up to the end of `node` were used just now."""
        while node is not None and not node.holds:
            self._unheld.move_to_end(node)
            node = node.parent

    def evict(self, count: int) -> list[int]:
        """Gives up `count` pages that nobody holds, those that were not used for longest first."""
        gone: list[int] = []
        while len(gone) < count:
            node, _ = self._unheld.popitem(last=False)
            kept = max(0, len(node.pages) - (count - len(gone)))
            gone += reversed(node.pages[kept:])
            if kept:
                self._shorten(node, kept)
            else:
                siblings = self._root if node.parent is None else node.parent.children
                del siblings[node.text[: self.page_tokens]]
                node.chain = ()
        for page in gone:
            del self.node_of[page]
        self.evictable -= count
        self.version += count > 0
        return gone

    def _shorten(self, node: Node, kept: int) -> None:
        """Leaves the node that comes first the first `kept` of its pages."""
        node.chain = node.chain[: len(node.chain) - len(node.pages) + kept]
        node.pages, node.text = node.pages[:kept], node.text[: kept * self.page_tokens]
        self._unheld[node] = None
        self._unheld.move_to_end(node, last=False)

    def check(self, pins: Sequence[int]) -> None:
        """Rebuilds everything from the links of the tree and from `pins`, how many chains that somebody pins
        end with each page. Raises EngineFault where it differs."""
        rank = {node: index for index, node in enumerate(self._unheld)}
        reached: dict[int, Node] = {}
        below: list[tuple[Node, Node | None]] = [(node, None) for node in self._root.values()]
        while below:
            node, parent = below.pop()
            reached.update(dict.fromkeys(node.pages, node))
            self._check_node(node, parent, pins)
            if (node in rank) != (not node.holds):
                raise EngineFault(f"pages {node.pages} are evictable against their holds")
            if parent is not None and not parent.holds and rank[node] > rank[parent]:
                raise EngineFault(f"pages {parent.pages} would be evicted before {node.pages}")
            below += [(child, node) for child in node.children.values()]
        if reached != self.node_of or any(pins[page] for page in range(len(pins)) if page not in reached):
            raise EngineFault("published pages are not those of the prefix tree")
        if not rank.keys() <= set(reached.values()):
            raise EngineFault("pages are evictable that are not in the tree")
        if self.evictable != sum(not node.holds for node in reached.values()):
            raise EngineFault(f"{self.evictable} pages count as evictable, and others are")
        self._objects.check(self)

    def _check_node(self, node: Node, parent: Node | None, pins: Sequence[int]) -> None:
        pages, text = node.pages, node.text
        if not pages or len(text) != len(pages) * self.page_tokens:
            raise EngineFault(f"{len(pages)} pages are said to hold {len(text)} tokens")
        if node.parent is not parent or node.chain != (parent.chain if parent else ()) + pages:
            raise EngineFault(f"pages {pages} do not know those before them")
        siblings = self._root if parent is None else parent.children
        if siblings.get(text[: self.page_tokens]) is not node:
            raise EngineFault(f"pages {pages} are found under other tokens than they hold")
        holds = pins[pages[-1]] + sum(bool(child.holds) for child in node.children.values())
        if node.holds != holds or any(pins[page] for page in pages[:-1]):
            raise EngineFault(f"pages {pages} count {node.holds} holds and have {holds}")


class _Objects:
    """The nodes with which the whole pages of texts end, by the identity of the text: prefixes of a catalogue
    come again in every request, and to hash one costs more than all else of finding it.

    A node that was evicted or shortened has another chain than it had: `match_all` looks at its length.
    """

    __slots__ = ("_kept", "_tokens", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self._kept: dict[int, Tokens] = {}  # a text that is kept keeps its id to itself
        self._tokens = 0

    def add(self, text: Tokens, node: Node) -> None:
        key = id(text)
        if key not in self._kept:
            if self._tokens + len(text) > _OBJECT_TOKENS:
                self.nodes.clear()
                self._kept.clear()
                self._tokens = 0
            self._kept[key] = text
            self._tokens += len(text)
        self.nodes[key] = node

    def check(self, tree: PrefixTree) -> None:
        """Raises EngineFault where a text is found on pages that do not hold it."""
        for key, node in self.nodes.items():
            text = self._kept[key]
            if id(text) != key or node.chain != tree.match(text, len(node.chain)):
                raise EngineFault("a text is found on pages that do not hold it")
