// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/safefile"
)

// allocated returns the bytes allocated by a call.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// theirs creates a file owned by an unprivileged user.
func theirs(t *testing.T, text []byte) string {
	t.Helper()
	nstest.NeedRoot(t)
	path := filepath.Join(t.TempDir(), "list")
	if err := errors.Join(os.WriteFile(path, text, 0o644), os.Chmod(path, 0o644), os.Chown(path, 65534, 65534)); err != nil {
		t.Fatal(err)
	}
	return path
}

// A sparse file is free for its owner. weir must reject it by its size, or by its first bytes.
func TestListSparse(t *testing.T) {
	for _, c := range []struct {
		begins string
		size   int64
		want   string
	}{
		{"", 1 << 30, "1073741824 bytes exceed the limit of 67108864 for a list of user 65534 (1048576 prefixes): shorten it, or make root its owner"},
		{"", 64 << 20, ":1: NUL byte"},
		{"10.0.0.0/8\n# ", 64 << 20, ":2: NUL byte"},
		{"10.0.0.0/8\n", 64 << 20, ":2: NUL byte"},
	} {
		path := theirs(t, []byte(c.begins))
		if err := os.Truncate(path, c.size); err != nil {
			t.Fatal(err)
		}
		var err error
		cost := allocated(func() { _, err = readList(path) })
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q and %d bytes: got %v, want %q", c.begins, c.size, err, c.want)
		}
		if cost > 2<<20 {
			t.Errorf("%q and %d bytes: %d bytes of memory", c.begins, c.size, cost)
		}
	}
}

// The memory for a list is proportional to its distinct prefixes, not to its lines.
func TestListDuplicates(t *testing.T) {
	const lines = 1_000_000
	path := theirs(t, bytes.Repeat([]byte("1.1.1.1\n2001:db8::/32 # x\n"), lines/2))
	var l *list
	var err error
	cost := allocated(func() { l, err = readList(path) })
	if err != nil || len(l.entries) != 2 || l.Entries != 2 {
		t.Fatalf("%+v, %v", l, err)
	}
	if most := uint64(lines * 32); cost > most {
		t.Errorf("%d bytes of memory, want at most %d", cost, most)
	}
}

// Lists of other users have a prefix limit. Lists of root have a higher one.
func TestListPrefixesBounded(t *testing.T) {
	var b bytes.Buffer
	for i := range maxOthersPrefixes + 1 {
		b.WriteString(netip.AddrFrom4([4]byte{11 + byte(i>>24), byte(i >> 16), byte(i >> 8), byte(i)}).String() + "\n")
	}
	path := theirs(t, b.Bytes())
	want := fmt.Sprintf("more than %d prefixes, the limit of a list of user 65534", maxOthersPrefixes)
	if _, err := readList(path); err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, safefile.ErrRefused) {
		t.Errorf("%v, want %q", err, want)
	}
	if err := os.Chown(path, 0, 0); err != nil {
		t.Fatal(err)
	}
	if l, err := readList(path); err != nil || l.Entries != maxOthersPrefixes+1 {
		t.Errorf("of root: %+v, %v", l, err)
	}
}

// An invalid list is not read again until the file changes. A changed file is detected even with
// the old modification time.
func TestListUnfitIsReadOnce(t *testing.T) {
	path := theirs(t, append(bytes.Repeat([]byte("1.1.1.1\n"), 100_000), "no prefix\n"...))
	f := Filter{Lists: map[string]string{"bad": path}}
	const want = `:100001: "no prefix" is not an address or prefix`
	nstest.Eventually(t, func() error {
		var err error
		n := allocated(func() { _, err = f.readLists() })
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("%v, want %q", err, want)
		}
		if n > 64<<10 {
			return fmt.Errorf("it takes %d bytes of memory", n)
		}
		return nil
	})
	seen, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	text := append(bytes.Repeat([]byte("1.1.1.1\n"), 100_000), "127.0.0.1\n"...) // the same length
	if err := errors.Join(os.WriteFile(path, text, 0), os.Chtimes(path, time.Time{}, seen.ModTime())); err != nil {
		t.Fatal(err)
	}
	if ls, err := f.readLists(); err != nil || ls["bad"].Entries != 2 {
		t.Errorf("mended: %v", err)
	}
}

// Lines may have any length if most of it is a comment.
func TestListLongLines(t *testing.T) {
	long := strings.Repeat("x", 3*maxListText)
	for text, want := range map[string]string{
		"::1 #" + long: "::1/128", "::1\n#" + long + "\n::2": "::1/128 ::2/128", "::1\n#" + long + "\n": "::1/128",
		"#" + long[:maxListText-2] + "\n::1": "::1/128", "#" + long[:maxListText-1] + "\n::1": "::1/128", "#" + long[:maxListText] + "\n::1": "::1/128",
		"#" + long[:maxListText-1]:                                "",
		strings.Repeat(" ", maxListText-3) + "::1::2":             "list:1: ",
		strings.Repeat(" ", maxListText) + "::1":                  "list:1: ",
		"#" + long + "\n" + long:                                  "list:2: ",
		"#" + strings.Repeat("x", maxListText-2) + "\n::1\n::g\n": "list:3: ",
	} {
		l, err := readList(theirs(t, []byte(text)))
		var got []string
		if err == nil {
			for _, p := range l.entries {
				got = append(got, p.String())
			}
		}
		if s := strings.Join(got, " "); err == nil && s != want || err != nil && (want == "" || !strings.Contains(err.Error(), want)) {
			t.Errorf("%d bytes, %.20q: %q, %.200v, want %q", len(text), text, s, err, want)
		}
	}
}
