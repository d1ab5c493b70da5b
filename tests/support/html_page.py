"""A parser of the pages that notebooks show."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags, names of attributes, and texts of a page; a wrongly closed tag fails."""

    closed_by_others = frozenset()  # tags that HTML closes implicitly

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts, self.attributes = [], [], [], set()
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.attributes |= {name for name, _ in attrs}
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open[-1] != tag and self.open[-1] in self.closed_by_others:
            self.open.pop()
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)
