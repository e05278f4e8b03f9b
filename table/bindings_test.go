// SPDX-License-Identifier: Apache-2.0

package table_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/table"
	"github.com/weir-project/weir/table/tabletest"
)

func loadBindings(t testing.TB, room int) (*tabletest.Bound, *table.Bindings) {
	t.Helper()
	nstest.NeedRoot(t)
	p, err := tabletest.LoadBindings(room)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	b, err := table.OpenBindings(p.Maps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return p, b
}

// bound is the model: a plain map.
type bound map[table.Key]uint32

func (m bound) lookup(a netip.Addr, proto uint8, port uint16) (table.Binding, bool) {
	for l := a.BitLen(); l >= 0; l-- {
		p, _ := a.Prefix(l)
		for _, k := range []table.Key{{Prefix: p, Proto: proto, Port: port}, {Prefix: p, Proto: proto}} {
			if v, ok := m[k]; ok {
				return table.Binding{Prefix: p, Proto: proto, Port: k.Port, Value: v}, true
			}
		}
	}
	return table.Binding{}, false
}

// drawKey often draws a bound key, an enclosing one or an enclosed one.
func drawKey(r *rand.Rand) table.Key {
	k := table.Key{Prefix: clustered(r, r.IntN(2) == 0), Proto: []uint8{6, 17}[r.IntN(2)], Port: uint16(r.IntN(4))}
	if r.IntN(3) == 0 { // many bindings of one prefix
		k.Prefix = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("2001:db8::/32"),
			netip.MustParsePrefix("10.1.2.3/32"), netip.MustParsePrefix("::/0")}[r.IntN(4)]
		k.Port = uint16(r.IntN(30))
	}
	return k
}

func checkBindings(t *testing.T, b *table.Bindings, m bound) {
	t.Helper()
	n := 0
	for x, err := range b.All() {
		if err != nil {
			t.Fatal(err)
		}
		if n++; m[x.Key()] != x.Value {
			t.Fatalf("%+v, want %d", x, m[x.Key()])
		}
	}
	if n != len(m) || b.Len() != n {
		t.Fatalf("%d bindings, Len is %d, want %d", n, b.Len(), len(m))
	}
}

func checkBound(t *testing.T, p *tabletest.Bound, b *table.Bindings, m bound, a netip.Addr, proto uint8, port uint16) {
	t.Helper()
	want, ok := m.lookup(a, proto, port)
	got, found := b.Lookup(a, proto, port)
	if got != want || found != ok {
		t.Fatalf("Lookup(%s, %d, %d) = %+v, %v, want %+v, %v", a, proto, port, got, found, want, ok)
	}
	v, bits, err := p.Lookup(a, proto, port)
	if err != nil || v != want.Value || ok && bits != want.Prefix.Bits() {
		t.Fatalf("the program returns for %s, %d, %d: %d /%d, %v, want %+v", a, proto, port, v, bits, err, want)
	}
}

// TestBindingsAgainstModel compares Go and the BPF program with the model under random changes.
func TestBindingsAgainstModel(t *testing.T) {
	p, b := loadBindings(t, 1<<17)
	steps := 40000
	if testing.Short() {
		steps = 4000
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	m := bound{}
	for i := range steps {
		k := drawKey(r)
		if r.IntN(5) < 2 {
			_, was := m[k]
			existed, err := b.Delete(k)
			if err != nil || existed != was {
				t.Fatalf("step %d: Delete(%+v) = %v, %v, want %v", i, k, existed, err, was)
			}
			delete(m, k)
		} else {
			m[k] = 1 + r.Uint32N(table.MaxBound)
			if err := b.Set(table.Binding{Prefix: k.Prefix, Proto: k.Proto, Port: k.Port, Value: m[k]}); err != nil {
				t.Fatalf("step %d: %v", i, err)
			}
		}
		if v, ok := b.Get(k); v != m[k] || ok != (m[k] != 0) {
			t.Fatalf("step %d: Get(%+v) = %d, %v, want %d", i, k, v, ok, m[k])
		}
		checkBound(t, p, b, m, within(r, k.Prefix), []uint8{6, 17, 1}[r.IntN(3)], uint16(r.IntN(31)))
		if i%(steps/10) == 0 {
			checkBindings(t, b, m)
			var all []table.Binding
			for k, v := range m {
				all = append(all, table.Binding{Prefix: k.Prefix, Proto: k.Proto, Port: k.Port, Value: v})
			}
			if err := b.Replace(all); err != nil {
				t.Fatal(err)
			}
			checkBindings(t, b, m)
		}
	}
	for k := range m {
		if existed, err := b.Delete(k); err != nil || !existed {
			t.Fatal(existed, err)
		}
	}
	checkBindings(t, b, bound{})
	var key [8]byte
	if err := p.Maps.Many.NextKey(nil, &key); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("the hash holds %v of no set: %v", key, err)
	}
}

// TestBindingsReaders checks that a change of a short prefix applies to all addresses below it at
// once. Other changes around it never show an intermediate answer.
func TestBindingsReaders(t *testing.T) {
	p, b := loadBindings(t, 1<<16)
	bind := func(s string, proto uint8, port uint16, v uint32) {
		if err := b.Set(table.Binding{Prefix: netip.MustParsePrefix(s), Proto: proto, Port: port, Value: v}); err != nil {
			t.Error(err)
		}
	}
	const always, sometimes = 1, 2
	bind("0.0.0.0/0", 17, 53, always)
	bind("::/0", 17, 53, always)
	var seen atomic.Int64
	var torn atomic.Pointer[string] // the first answer wrong both before and after
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		r := rand.New(rand.NewPCG(1, 1))
		for {
			select {
			case <-stop:
				return
			default:
			}
			v, _, err := p.Lookup(within(r, clustered(r, r.IntN(2) == 0)), 17, 53)
			if err != nil || v != always && v != sometimes {
				torn.CompareAndSwap(nil, new(fmt.Sprintf("%d, %v", v, err)))
			}
			seen.Add(1)
		}
	}()
	r := rand.New(rand.NewPCG(rand.Uint64(), 2))
	begun := time.Now()
	for late := time.Duration(0); late < 2*time.Second || seen.Load() < 1000 && late < time.Minute; late = time.Since(begun) {
		k := drawKey(r)
		if k.Prefix.Bits() == 0 {
			continue
		}
		x := table.Binding{Prefix: k.Prefix, Proto: k.Proto, Port: k.Port, Value: 3}
		if k.Proto == 17 && k.Port == 0 {
			x.Value = sometimes
		}
		if k.Proto == 17 && k.Port == 1 {
			x.Port, x.Value = 53, sometimes
		}
		if r.IntN(2) == 0 {
			if err := b.Set(x); err != nil {
				t.Fatal(err)
			}
		} else if _, err := b.Delete(x.Key()); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	<-done
	if wrong := torn.Load(); wrong != nil {
		t.Errorf("one of %d lookups returned a value never bound: %s", seen.Load(), *wrong)
	}
	if seen.Load() < 1000 {
		t.Errorf("only %d lookups in a minute: the test shows nothing", seen.Load())
	}
}

// TestBindingsFull checks that full bindings return ErrFull and stay unchanged.
func TestBindingsFull(t *testing.T) {
	p, b := loadBindings(t, 1000)
	m := bound{}
	r := rand.New(rand.NewPCG(5, 5))
	for i := uint32(1); ; i++ {
		k := table.Key{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(i >> 14), byte(i >> 6), 0, byte(i)}), 32), Proto: 6, Port: uint16(1 + i%3)}
		if i%2 == 0 { // large sets are in another map
			k.Prefix, k.Port = netip.MustParsePrefix("192.0.2.0/24"), uint16(i)
		}
		err := b.Set(table.Binding{Prefix: k.Prefix, Proto: k.Proto, Port: k.Port, Value: i})
		if errors.Is(err, table.ErrFull) {
			t.Logf("%d: %v", i, err)
			break
		} else if err != nil {
			t.Fatal(err)
		}
		m[k] = i
	}
	if len(m) != 1000 {
		t.Errorf("full after %d", len(m))
	}
	for k := range m { // bound keys can still change
		m[k]++
		if err := b.Set(table.Binding{Prefix: k.Prefix, Proto: k.Proto, Port: k.Port, Value: m[k]}); err != nil {
			t.Fatal(err)
		}
	}
	checkBindings(t, b, m)
	for k := range m {
		checkBound(t, p, b, m, within(r, k.Prefix), 6, k.Port)
	}
}

func bindLine(k table.Key, v uint32) string {
	return fmt.Sprintf("%s %d", k.Prefix, uint64(k.Proto)<<48|uint64(k.Port)<<32|uint64(v))
}

func parseBind(t *testing.T, line string) (k table.Key, v uint32) {
	t.Helper()
	var at string
	var n uint64
	if _, err := fmt.Sscan(line, &at, &n); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return table.Key{Prefix: netip.MustParsePrefix(at), Proto: uint8(n >> 48), Port: uint16(n >> 32)}, uint32(n)
}

// bindForever binds and unbinds at random until it is killed.
func bindForever() error {
	var fds [5]*ebpf.Map
	for i := range fds {
		var err error
		if fds[i], err = ebpf.NewMapFromFD(3 + i); err != nil {
			return err
		}
	}
	b, err := table.OpenBindings(table.BindingMaps{Maps: table.Maps{Head: fds[0], Index: fds[1], Pages: fds[2]}, Sets: fds[3], Many: fds[4]})
	if err != nil {
		return err
	}
	seed, err := strconv.ParseUint(os.Args[2], 10, 64)
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(seed, 0))
	for {
		k, v := drawKey(r), 1+r.Uint32N(1000)
		fmt.Println(bindLine(k, v))
		if v%3 == 0 {
			_, err = b.Delete(k)
		} else {
			err = b.Set(table.Binding{Prefix: k.Prefix, Proto: k.Proto, Port: k.Port, Value: v})
		}
		if err != nil {
			return err
		}
		fmt.Println("done")
	}
}

// TestBindingsKilledWriter checks that a killed writer leaves whole bindings, keeps the links
// between prefixes, and leaks no memory.
func TestBindingsKilledWriter(t *testing.T) {
	p, b := loadBindings(t, 1<<17)
	b.Close()
	m := bound{}
	did := func(line string) {
		if k, v := parseBind(t, line); v%3 == 0 {
			delete(m, k)
		} else {
			m[k] = v
		}
	}
	r := rand.New(rand.NewPCG(rand.Uint64(), 4))
	rounds := 60
	if testing.Short() {
		rounds = 8
	}
	interrupted := 0
	for round := 0; round < rounds || interrupted == 0 && round < 10*rounds; round++ {
		doing := runWriter(t, "__bind", []*ebpf.Map{p.Maps.Head, p.Maps.Index, p.Maps.Pages, p.Maps.Sets, p.Maps.Many}, r, did)
		var err error
		if b, err = table.OpenBindings(p.Maps); err != nil {
			t.Fatal(err)
		}
		if doing != "" {
			interrupted++
			k, v := parseBind(t, doing)
			got, ok := b.Get(k)
			switch {
			case got == m[k] && ok == (m[k] != 0): // not done yet
			case v%3 == 0 && !ok, v%3 != 0 && got == v:
				did(doing)
			default:
				t.Fatalf("round %d: %+v has %d, was %d and was to be %d", round, k, got, m[k], v)
			}
		}
		checkBindings(t, b, m)
		for range 2000 {
			k := drawKey(r)
			checkBound(t, p, b, m, within(r, k.Prefix), k.Proto, k.Port)
		}
		b.Close()
	}
	if interrupted == 0 {
		t.Error("no writer was killed in the middle of a change: the test shows nothing")
	}
}

// TestBindingsShare checks that prefixes with equal bindings share one set until one of them
// changes.
func TestBindingsShare(t *testing.T) {
	p, b := loadBindings(t, 1<<16)
	m := bound{}
	var all []table.Binding
	for i := range 60000 {
		x := table.Binding{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32), Proto: 6, Port: 443, Value: 1 + uint32(i%10)}
		all, m[x.Key()] = append(all, x), x.Value
	}
	for range 2 { // with a set for each, there is room for half of them
		if err := b.Replace(all); err != nil {
			t.Fatal(err)
		}
	}
	checkBindings(t, b, m)
	change := func(prefix string, proto uint8, port uint16, value uint32) {
		t.Helper()
		x := table.Binding{Prefix: netip.MustParsePrefix(prefix), Proto: proto, Port: port, Value: value}
		if err := b.Set(x); err != nil {
			t.Fatal(err)
		}
		m[x.Key()] = value
	}
	change("10.0.1.1/32", 6, 443, 77)  // another value
	change("10.0.1.2/32", 17, 443, 78) // one more binding
	change("10.0.2.0/24", 6, 0, 79)    // encloses 256 of them
	change("10.0.0.0/8", 17, 53, 80)   // encloses all of them
	change("0.0.0.0/0", 1, 0, 81)
	for _, k := range []table.Key{{Prefix: netip.MustParsePrefix("10.0.1.3/32"), Proto: 6, Port: 443}, {Prefix: netip.MustParsePrefix("10.0.0.0/8"), Proto: 17, Port: 53}} {
		if existed, err := b.Delete(k); err != nil || !existed {
			t.Fatal(existed, err)
		}
		delete(m, k)
	}
	checkBindings(t, b, m)
	r := rand.New(rand.NewPCG(6, 6))
	for range 5000 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(r.IntN(4)), byte(r.IntN(6))})
		checkBound(t, p, b, m, a, []uint8{6, 17, 1}[r.IntN(3)], []uint16{443, 53, 80}[r.IntN(3)])
	}
}
