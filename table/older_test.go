// SPDX-License-Identifier: Apache-2.0

package table

import (
	"bufio"
	"compress/gzip"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// testdata/wtp2.gz has the three maps of a table of 541 prefixes, one after the other, as the package of commit 18ccb3f
// wrote them: neighbours in fans, nested ones in pages below each other, lists, short ones in the roots, and
// every ninth deleted again. wtp2.txt has the prefixes and their values.
func olderTable(t *testing.T) (image []byte, want map[netip.Prefix]uint32) {
	t.Helper()
	f, err := os.Open("testdata/wtp2.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if image, err = io.ReadAll(z); err != nil {
		t.Fatal(err)
	}
	lines, err := os.Open("testdata/wtp2.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer lines.Close()
	want = map[netip.Prefix]uint32{}
	for s := bufio.NewScanner(lines); s.Scan(); {
		var p string
		var v uint32
		if _, err := fmt.Sscan(s.Text(), &p, &v); err != nil {
			t.Fatal(err)
		}
		want[netip.MustParsePrefix(p)] = v
	}
	return image, want
}

func TestOlderTableIsRead(t *testing.T) {
	image, want := olderTable(t)
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err) // before Linux 5.11 maps count
	}
	var m Maps
	for _, a := range []struct {
		to      **ebpf.Map
		size    uintptr
		entries uint32
	}{
		{&m.Head, unsafe.Sizeof(olderHead{}), 1}, {&m.Index, unsafe.Sizeof(olderIndex{}), 2}, {&m.Pages, segmentBytes + slackBytes, 1},
	} {
		made, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: uint32(a.size), MaxEntries: a.entries, Flags: unix.BPF_F_MMAPABLE})
		if err != nil {
			t.Fatal(err)
		}
		defer made.Close()
		for i := range a.entries {
			if err := made.Put(i, image[:a.size]); err != nil {
				t.Fatal(err)
			}
			image = image[a.size:]
		}
		*a.to = made
	}
	if len(image) != 0 {
		t.Fatalf("%d bytes are left: these are not the maps of a table", len(image))
	}
	if _, err := Open(m); err == nil {
		t.Error("it was opened for writing")
	}
	x, err := OpenReader(m)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	got, truth := map[netip.Prefix]uint32{}, model{}
	for e := range x.All() {
		got[e.Prefix] = e.Value
	}
	for p, v := range want {
		truth[p] = v
	}
	if !maps.Equal(got, want) {
		t.Errorf("%d prefixes are read, want %d", len(got), len(want))
		for p, v := range want {
			if got[p] != v {
				t.Errorf("%s is %d, want %d", p, got[p], v)
			}
		}
	}
	for p := range want {
		if v, _ := x.Lookup(p.Addr()); v != truth.lookup(p.Addr()) {
			t.Errorf("%s: %d, want %d", p.Addr(), v, truth.lookup(p.Addr()))
		}
	}
}
