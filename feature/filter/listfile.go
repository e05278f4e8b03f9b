// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/weir-project/weir/internal/safefile"
)

// Bounds of a list file. Its owner may be another user and must not exhaust weir's memory or time.
const (
	// maxListPrefixes is a million for each of the up to eight tables of a list.
	maxListPrefixes = 8 << 20
	// maxOthersPrefixes is the maximum for files of other users.
	maxOthersPrefixes = 1 << 20
	// maxListLine is the maximum mean line length in bytes. The longest prefix has 44, and a
	// comment may follow.
	maxListLine = 64
	// maxListText is the maximum text before a comment, in bytes.
	maxListText = 64 << 10
)

// readLists reads the files of a filter's lists.
func (f Filter) readLists() (map[string]*list, error) {
	if err := f.unfitLists(); err != nil {
		return nil, err
	}
	out := map[string]*list{}
	for _, name := range slices.Sorted(maps.Keys(f.Lists)) {
		if l := f.saved[name]; l != nil {
			out[name] = l
			continue
		}
		l, err := readList(f.Lists[name])
		if err != nil {
			return nil, f.listError(name, err)
		}
		out[name] = l
	}
	return out, nil
}

// unfitLists returns the cached error of an invalid, unchanged list file. It reads no file
// contents.
func (f Filter) unfitLists() error {
	for _, name := range slices.Sorted(maps.Keys(f.Lists)) {
		if f.saved[name] != nil {
			continue
		}
		if err := unfitLists.find(f.Lists[name]); err != nil {
			return f.listError(name, err)
		}
	}
	return nil
}

func (f Filter) listError(name string, err error) error {
	if f.Name == "" { // without a configuration
		return fmt.Errorf("list %s: %w", name, err)
	}
	return f.Pos.At("lists").At(name).Errorf("filter.%s.lists.%s: %w", f.Name, name, err)
}

// unfit caches the errors of invalid list files by path. weir serve retries files every few
// seconds: the cache avoids reading an unchanged invalid list again.
type unfit struct {
	mu    sync.Mutex
	files map[string]unfitFile
}

type unfitFile struct {
	seen safefile.Seen
	err  error
}

var unfitLists = unfit{files: map[string]unfitFile{}}

// find returns the cached error of a file if the file is unchanged.
func (u *unfit) find(path string) error {
	u.mu.Lock()
	was, ok := u.files[path]
	u.mu.Unlock()
	if !ok {
		return nil
	}
	if now, err := safefile.Stat(path); err == nil && now == was.seen {
		return was.err
	}
	u.note(path, safefile.Seen{}, nil)
	return nil
}

func (u *unfit) note(path string, seen safefile.Seen, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.files, path)
	if err != nil {
		u.files[path] = unfitFile{seen, err}
	}
}

// readList reads a file with one address or prefix a line; a # begins a comment. Prefixes must not
// have bits set beyond their length, as in expressions and bindings: 10.1.0.1/16 may mean the one
// address.
func readList(path string) (*list, error) {
	f, err := safefile.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r := listReader{path: path, file: f, max: maxListPrefixes}
	if !f.Trusted() {
		r.max = maxOthersPrefixes
	}
	settled := f.Seen.Settled()
	if f.Seen.Size > int64(r.max)*maxListLine {
		return nil, r.tooLarge(f.Seen.Size)
	}
	hash := sha256.New()
	r.from = bufio.NewReaderSize(io.TeeReader(io.LimitReader(f, int64(r.max)*maxListLine+1), hash), maxListText)
	err = r.read()
	if r.unfit && settled {
		unfitLists.note(path, f.Seen, err)
	}
	if err != nil {
		return nil, err
	}
	l := &list{Hash: fmt.Sprintf("%x", hash.Sum(nil))[:16], entries: r.entries}
	l.chooseStorage()
	return l, nil
}

// listReader reads the prefixes of a file. Its memory is proportional to the number of distinct
// prefixes.
type listReader struct {
	path string
	file *safefile.Stream
	from *bufio.Reader
	max  int // maximum number of prefixes

	line    int
	bytes   int64
	entries []netip.Prefix
	unfit   bool // the contents are invalid
}

func (r *listReader) read() error {
	r.entries = []netip.Prefix{}
	for full := 4096; ; {
		text, err := r.next()
		if err == io.EOF {
			break
		} else if err != nil {
			return err
		}
		if text == "" {
			continue
		}
		p, err := r.parse(text)
		if err != nil {
			r.unfit = true
			return err
		}
		if r.entries = append(r.entries, p); len(r.entries) < full {
			continue
		}
		if err := r.compact(); err != nil {
			return err
		}
		full = max(full, 2*len(r.entries))
	}
	return r.compact()
}

// next returns the next line without its comment, or [io.EOF].
func (r *listReader) next() (string, error) {
	line, err := r.from.ReadSlice('\n')
	r.line++
	text, _, comment := bytes.Cut(line, []byte("#"))
	out := string(bytes.TrimSpace(text))
	for {
		if r.bytes += int64(len(line)); r.bytes > int64(r.max)*maxListLine {
			return "", r.tooLarge(r.bytes) // the file grew meanwhile
		}
		if bytes.IndexByte(line, 0) >= 0 {
			r.unfit = true
			return "", fmt.Errorf("%s:%d: NUL byte: want a list of prefixes", r.path, r.line)
		}
		if err == bufio.ErrBufferFull && !comment {
			return out + "…", nil // too long for a prefix
		}
		if err != bufio.ErrBufferFull {
			break
		}
		line, err = r.from.ReadSlice('\n')
	}
	if err == io.EOF && (len(line) > 0 || comment) {
		err = nil
	}
	return out, err
}

func (r *listReader) parse(text string) (netip.Prefix, error) {
	p, err := parsePrefix(text)
	public := r.file.Public()
	if err != nil {
		if !public {
			return p, fmt.Errorf("%s:%d: not an address or prefix", r.path, r.line)
		}
		return p, fmt.Errorf("%s:%d: %.80q is not an address or prefix%s", r.path, r.line, text, zoned(text))
	}
	m := p.Masked()
	switch {
	case m == p:
		return p, nil
	case !public:
		return p, fmt.Errorf("%s:%d: this prefix has bits set beyond its length", r.path, r.line)
	}
	return p, fmt.Errorf("%s:%d: %.80q has bits set beyond its length: write %s, or %s for the one address", r.path, r.line, text, m, p.Addr())
}

// compact sorts the entries and removes duplicates.
func (r *listReader) compact() error {
	slices.SortFunc(r.entries, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return cmp.Compare(a.Bits(), b.Bits())
	})
	r.entries = slices.Compact(r.entries)
	if len(r.entries) > r.max {
		r.unfit = true
		return fmt.Errorf("%s: %w: more than %d prefixes, the limit of %s: aggregate prefixes%s", r.path, safefile.ErrRefused, r.max, r.owner(), r.remedy())
	}
	return nil
}

func (r *listReader) tooLarge(size int64) error {
	return fmt.Errorf("%s: %w: %d bytes exceed the limit of %d for %s (%d prefixes): shorten it%s", r.path, safefile.ErrRefused, size, int64(r.max)*maxListLine, r.owner(), r.max, r.remedy())
}

func (r *listReader) owner() string {
	if r.file.Trusted() {
		return "a list"
	}
	if r.file.Mode.Perm()&0o002 != 0 {
		return "a list writable by everybody"
	}
	return fmt.Sprintf("a list of user %d", r.file.UID)
}

// remedy returns an additional remedy.
func (r *listReader) remedy() string {
	if r.file.Trusted() {
		return ", or spread it over several lists"
	}
	return ", or make root its owner and only writer"
}

var errZone = errors.New("zones are not supported")

// zoned returns the remedy for an address with a zone.
func zoned(text string) string {
	if address, zone, ok := strings.Cut(text, "%"); ok {
		return fmt.Sprintf(": zones are not supported: write %.80s without %%%.80s", address, zone)
	}
	return ""
}

func parsePrefix(s string) (netip.Prefix, error) {
	if !strings.Contains(s, "/") {
		a, err := netip.ParseAddr(s)
		if a.Zone() != "" {
			return netip.Prefix{}, errZone
		}
		return netip.PrefixFrom(a, a.BitLen()), err
	}
	return netip.ParsePrefix(s)
}
