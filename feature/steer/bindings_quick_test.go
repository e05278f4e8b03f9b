// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/table"
)

// slowly parses as ParseBindings does a file that has something unusual in it.
func slowly(text []byte) ([]Binding, error) {
	p := bindingsParser{file: "file", text: text, dec: json.NewDecoder(bytes.NewReader(text))}
	p.dec.DisallowUnknownFields()
	if err := p.whole(); err != nil {
		return nil, err
	}
	return p.once()
}

// sameBindings holds what is read quickly to what encoding/json reads.
func sameBindings(t *testing.T, text []byte) (quick bool) {
	t.Helper()
	_, _, quick = quickBindings(text)
	got, err := ParseBindings("file", text)
	want, wantErr := slowly(text)
	if fmt.Sprint(err) != fmt.Sprint(wantErr) || !slices.Equal(got, want) {
		t.Errorf("%q\n%v, %v\nwant %v, %v", text, got, err, want, wantErr)
	}
	return quick
}

var quickFiles = []struct {
	text  string
	quick bool
}{
	{`{"bindings": []}`, true},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24","port":80,"protocol":"tcp"}]}`, true},
	{"\n{ \"bindings\" : [ {\"port\":0 ,\t\"prefix\" : \"2001:db8::1\", \"label\":\"a b\"\r\n} , {\"label\":\"c\",\"prefix\":\"::ffff:192.0.2.1\"} ] } \n", true},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.7/24","protocol":"tcp"},{"label":"a","prefix":"192.0.2.0/24"}]}`, true},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24"},{"label":"b","prefix":"192.0.2.0/24","protocol":"udp"}]}`, true},
	{`{"bindings":[{"label":"\u0061","prefix":"192.0.2.0/24"}]}`, false},
	{`{"bindings":[{"label":"ä","prefix":"192.0.2.0/24"}]}`, false},
	{`{"bindings":[{"label":"a","label":"b","prefix":"192.0.2.0/24"}]}`, false},
	{`{"bindings":[{"Label":"a","prefix":"192.0.2.0/24"}]}`, false},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24","protocol":""}]}`, false},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24","port":65536}]}`, false},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24","port":01}]}`, false},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24","port":1e3}]}`, false},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24","port":null}]}`, false},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/33"}]}`, false},
	{`{"bindings":[{"label":"","prefix":"192.0.2.0/24"}]}`, false},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24"},]}`, false},
	{`{"bindings":[{"label":"a","prefix":"192.0.2.0/24",}]}`, false},
	{`{"bindings":[{}]}`, false},
	{`{"bindings":[]}x`, false},
	{"{\"bindings\":[]}\x00", false},
	{`{"bindings":[]`, false},
	{`{"bindings":[],"more":[]}`, false},
	{`{}`, false},
	{``, false},
}

func TestQuickBindings(t *testing.T) {
	for _, c := range quickFiles {
		if quick := sameBindings(t, []byte(c.text)); quick != c.quick {
			t.Errorf("%q: read quickly: %t", c.text, quick)
		}
	}
	long := `{"bindings":[{"label":"` + strings.Repeat("x", MaxLabel+1) + `","prefix":"192.0.2.0/24"}]}`
	if sameBindings(t, []byte(long)) {
		t.Error("a name that is too long was read")
	}
}

// What weir writes is read quickly, and as it was.
func TestQuickBindingsOfWrite(t *testing.T) {
	want := someBindings(rand.New(rand.NewPCG(1, 2)), 1000)
	text, err := WriteBindings(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseBindings("file", text)
	if err != nil || !slices.Equal(got, want) || !sameBindings(t, text) {
		t.Errorf("%d bindings were read as %d others, or slowly: %v", len(want), len(got), err)
	}
}

func FuzzQuickBindings(f *testing.F) {
	for _, c := range quickFiles {
		f.Add([]byte(c.text))
	}
	f.Fuzz(func(t *testing.T, text []byte) { sameBindings(t, text) })
}

// someBindings are different, of prefixes that often enclose one another.
func someBindings(r *rand.Rand, n int) (all []Binding) {
	seen := map[table.Key]bool{}
	for len(all) < n {
		a := netip.AddrFrom4([4]byte{10, 0, byte(r.IntN(4)), byte(r.IntN(256))})
		if r.IntN(3) == 0 {
			a = netip.AddrFrom16([16]byte{0x20, 1, 15: byte(r.IntN(256))})
		}
		p, _ := a.Prefix(a.BitLen() - r.IntN(10))
		b := Binding{fmt.Sprint("s", r.IntN(20)), p, uint16(r.IntN(3)), []Proto{unix.IPPROTO_TCP, unix.IPPROTO_UDP}[r.IntN(2)]}
		if !seen[b.key()] {
			seen[b.key()] = true
			all = append(all, b)
		}
	}
	return all
}

func TestDiff(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		had, want := someBindings(r, r.IntN(300)), someBindings(r, r.IntN(300))
		now := boundNow{names: map[uint32]string{}}
		ids, before := map[string]uint32{}, map[table.Key]string{}
		for _, b := range had {
			id, ok := ids[b.Service]
			if !ok {
				id = uint32(len(ids))
				ids[b.Service], now.names[id] = id, b.Service
			}
			before[b.key()] = b.Service
			now.all = append(now.all, table.Binding{Prefix: b.Prefix, Proto: uint8(b.Proto), Port: b.Port, Value: id + 1})
		}
		now.order = bindingsInOrder(had)
		var plain Diff
		wanted := map[table.Key]bool{}
		for _, b := range want {
			wanted[b.key()] = true
			switch from, ok := before[b.key()]; {
			case !ok:
				plain.Added = append(plain.Added, b)
			case from != b.Service:
				plain.Moved = append(plain.Moved, Moved{b, from})
			default:
				plain.Same++
			}
		}
		for _, o := range now.order {
			if !wanted[had[o.at].key()] {
				plain.Removed = append(plain.Removed, had[o.at])
			}
		}
		got, none := now.diff(want, bindingsInOrder(want), false)
		more, kept := now.diff(want, bindingsInOrder(want), true)
		if !reflect.DeepEqual(got, plain) || len(none) > 0 || more.Removed != nil || len(kept) != len(plain.Removed) {
			t.Fatalf("%v\nto %v\ngives %v\nwant %v", had, want, got, plain)
		}
	}
}

// Bindings come by address, IPv4 first, then by length, protocol and port; what is alike stays as it was.
func TestBindingsInOrder(t *testing.T) {
	parse := netip.MustParsePrefix
	want := []Binding{
		{"a", parse("0.0.0.0/0"), 0, 6}, {"a", parse("10.0.0.0/8"), 0, 6}, {"a", parse("10.0.0.0/8"), 7, 6}, {"a", parse("10.0.0.0/8"), 0, 17},
		{"b", parse("10.0.0.0/8"), 0, 17}, {"a", parse("10.0.0.0/9"), 0, 6}, {"a", parse("200.0.0.0/8"), 0, 6}, {"a", parse("::/0"), 0, 6},
		{"a", parse("::ffff:10.0.0.0/128"), 0, 6}, {"a", parse("2001:db8::/32"), 0, 6}, {"a", parse("2001:db8::1/128"), 0, 6},
	}
	all := slices.Clone(want)
	for i := range all {
		j := (i * 7) % len(all)
		all[i] = want[j]
	}
	var got []Binding
	for _, o := range bindingsInOrder(all) {
		got = append(got, all[o.at])
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}
