// SPDX-License-Identifier: Apache-2.0

package names_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb/names"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/nstest"
)

func open(t *testing.T, before *names.Names) *names.Names {
	t.Helper()
	nstest.NeedRoot(t)
	n, err := names.Open(nil)
	if before != nil {
		n.Close()
		n, err = names.Open(before.Map())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

// TestNamesOutliveTheirProcess checks that owners are read back from the map.
func TestNamesOutliveTheirProcess(t *testing.T) {
	n := open(t, nil)
	long := strings.Repeat("n", 255)
	for number, name := range map[move.Backend]string{1: "h1", 2: "h2", 3: "gone", 1023: long} {
		if err := n.Keep(number, name); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.KeepUnknown(7, "02:00:00:00:00:01 of interface 3"); err != nil {
		t.Fatal(err)
	}
	if err := n.Free(3); err != nil {
		t.Fatal(err)
	}
	if err := n.Free(3); err != nil {
		t.Errorf("free again: %v", err)
	}
	again := open(t, n)
	for number, want := range map[move.Backend]names.Owner{1: {Name: "h1"}, 2: {Name: "h2"}, 7: {Location: "02:00:00:00:00:01 of interface 3"}, 1023: {Name: long}} {
		if o, owned := again.Owner(number); !owned || o != want || o.Unknown() != (want.Name == "") {
			t.Errorf("number %d: %+v, %t: want %+v", number, o, owned, want)
		}
	}
	if o, owned := again.Owner(3); owned {
		t.Errorf("number 3 is free, and belongs to %+v", o)
	}
	if all := again.All(); !slices.Equal(all, []move.Backend{1, 2, 7, 1023}) {
		t.Errorf("numbers %v", all)
	}
	if a, b, c := again.Number("h2"), again.Number("gone"), again.Number(""); a != 2 || b != 0 || c != 0 {
		t.Errorf("numbers of h2, gone and the empty name: %d, %d, %d", a, b, c)
	}
}

// TestNamesRefused checks that unusable names are errors and change nothing.
func TestNamesRefused(t *testing.T) {
	n := open(t, nil)
	for _, name := range []string{"", strings.Repeat("n", 256), "a\x00b"} {
		if err := n.Keep(1, name); err == nil {
			t.Errorf("a name of %d bytes is accepted", len(name))
		}
	}
	if o, owned := n.Owner(1); owned {
		t.Errorf("%+v", o)
	}
}

// TestDamagedNames checks that entries of random content keep their numbers closed, and that numbers
// out of range are left out.
func TestDamagedNames(t *testing.T) {
	n := open(t, nil)
	for number, b := range map[uint32]byte{1: 0, 2: 0xff, 5000: 'a'} {
		if err := n.Map().Put(number, bytes.Repeat([]byte{b}, 256)); err != nil {
			t.Fatal(err)
		}
	}
	again := open(t, n)
	for _, number := range []move.Backend{1, 2} {
		if o, owned := again.Owner(number); !owned || !o.Unknown() || o.Location != "" {
			t.Errorf("number %d: %+v, %t: want it owned by nobody known", number, o, owned)
		}
	}
	if all := again.All(); len(all) != 2 {
		t.Errorf("numbers %v", all)
	}
}

// TestLooseAndLeft checks that the state of owners is read back, that a new owner has none, and that
// the longest names have room for none.
func TestLooseAndLeft(t *testing.T) {
	n := open(t, nil)
	long := strings.Repeat("n", 247)
	for number, name := range map[move.Backend]string{1: "h1", 2: "h2", 3: long, 4: long[:246]} {
		if err := errors.Join(n.Keep(number, name), n.Loosen(number, true), n.Leave(number, 1<<40)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(n.Keep(2, "other"), n.Loosen(9, true), n.KeepUnknown(5, "here"), n.Leave(5, 1)); err != nil {
		t.Fatal(err)
	}
	if o, _ := n.Owner(3); !o.Loose || o.Left != 1<<40 {
		t.Errorf("%+v: want it loose in this process", o)
	}
	again := open(t, n)
	for number, want := range map[move.Backend]names.Owner{1: {Name: "h1", Loose: true, Left: 1 << 40}, 2: {Name: "other"}, 3: {Name: long},
		4: {Name: long[:246], Loose: true, Left: 1 << 40}, 5: {Location: "here"}} {
		if o, _ := again.Owner(number); o != want {
			t.Errorf("number %d: %+v, want %+v", number, o, want)
		}
	}
	if _, owned := again.Owner(9); owned {
		t.Error("a number without an owner got one")
	}
}
