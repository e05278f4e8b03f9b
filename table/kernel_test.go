// SPDX-License-Identifier: Apache-2.0

package table_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/table"
	"github.com/weir-project/weir/table/tabletest"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "__write" {
		fmt.Println(write())
		os.Exit(1)
	}
	if len(os.Args) > 1 && os.Args[1] == "__bind" {
		fmt.Println(bindForever())
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func load(t testing.TB, segments int) (*tabletest.Probe, *table.Table) {
	t.Helper()
	nstest.NeedRoot(t)
	p, err := tabletest.Load(segments)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	tab, err := table.Open(p.Maps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tab.Close() })
	return p, tab
}

// lookup asks the program and Go and compares their answers.
func lookup(t *testing.T, p *tabletest.Probe, tab *table.Table, a netip.Addr) uint32 {
	t.Helper()
	v, err := p.Lookup(a)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := tab.Lookup(a); got != v {
		t.Fatalf("%s is %d to the program and %d to Go", a, v, got)
	}
	return v
}

func longest(all map[netip.Prefix]uint32, a netip.Addr) uint32 {
	for l := a.BitLen(); l >= 0; l-- {
		p, _ := a.Prefix(l)
		if v, ok := all[p]; ok {
			return v
		}
	}
	return 0
}

// within returns an address in a prefix, or one with a prefix bit flipped.
func within(r *rand.Rand, p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= byte(r.IntN(2)) << (7 - i%8)
	}
	if p.Bits() > 0 && r.IntN(3) == 0 {
		i := r.IntN(p.Bits())
		b[i/8] ^= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// clustered draws prefixes that often enclose each other.
func clustered(r *rand.Rand, ipv6 bool) netip.Prefix {
	if !ipv6 {
		a := netip.AddrFrom4([4]byte{10, byte(r.IntN(3)), byte(r.IntN(8)), byte(r.IntN(256))})
		p, _ := a.Prefix(r.IntN(33))
		return p
	}
	b := [16]byte{0x20, 1, 0x0d, byte(0xb8 + r.IntN(3)), byte(r.IntN(2)), byte(r.IntN(8)), 0, byte(r.IntN(4)), 0, 0, 0, byte(r.IntN(2)), 0, 0, 0, byte(r.IntN(64))}
	p, _ := netip.AddrFrom16(b).Prefix(r.IntN(129))
	return p
}

// TestProgram compares the program with Go and the model, for a table built at once and then
// changed step by step.
func TestProgram(t *testing.T) {
	p, tab := load(t, 4)
	r := rand.New(rand.NewPCG(rand.Uint64(), 1))
	all := map[netip.Prefix]uint32{}
	var known []netip.Prefix
	var entries []table.Entry
	for i := range 3000 {
		e := table.Entry{Prefix: clustered(r, i%2 == 0), Value: 1 + r.Uint32N(table.MaxValue)}
		all[e.Prefix], entries, known = e.Value, append(entries, e), append(known, e.Prefix)
	}
	for i := range 3000 { // enough neighbours for a fan
		e := table.Entry{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(i >> 8), byte(i), 0}), 24), Value: uint32(1 + i)}
		if i%2 == 0 {
			e.Prefix = netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 2, 0, 0, byte(i >> 8), byte(i)}), 48)
		}
		all[e.Prefix], entries, known = e.Value, append(entries, e), append(known, e.Prefix)
	}
	if err := tab.Replace(entries); err != nil {
		t.Fatal(err)
	}
	lookups := 40000
	if testing.Short() {
		lookups = 4000
	}
	for i := range lookups {
		q := known[r.IntN(len(known))]
		a := within(r, q)
		if got, want := lookup(t, p, tab, a), longest(all, a); got != want {
			t.Fatalf("%s is %d, want %d", a, got, want)
		}
		if i%4 > 0 {
			continue
		}
		if r.IntN(2) == 0 {
			if _, err := tab.Delete(q); err != nil {
				t.Fatal(err)
			}
			delete(all, q)
		} else if all[q] = 1 + r.Uint32N(table.MaxValue); tab.Set(q, all[q]) != nil {
			t.Fatalf("Set(%s)", q)
		}
	}
}

// TestReaders checks that each lookup of a program sees the table before a change or after it.
func TestReaders(t *testing.T) {
	p, tab := load(t, 4)
	const outer, inner = 1, 2
	mustSet := func(s string, v uint32) {
		if err := tab.Set(netip.MustParsePrefix(s), v); err != nil {
			t.Error(err)
		}
	}
	mustSet("10.0.0.0/8", outer)
	mustSet("2001:db8::/32", outer)
	var torn, seen atomic.Int64
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			a := netip.AddrFrom4([4]byte{10, 1, 2, byte(i)})
			if i%2 > 0 {
				b := netip.MustParseAddr("2001:db8:0:1::").As16()
				b[15] = byte(i)
				a = netip.AddrFrom16(b)
			}
			v, err := p.Lookup(a)
			if err != nil || v != outer && v != inner {
				torn.Add(1)
			}
			seen.Add(1)
		}
	}()
	r := rand.New(rand.NewPCG(rand.Uint64(), 2))
	begun := time.Now()
	for late := time.Duration(0); late < 2*time.Second || seen.Load() < 1000 && late < time.Minute; late = time.Since(begun) {
		var q netip.Prefix
		if r.IntN(2) == 0 {
			q, _ = netip.AddrFrom4([4]byte{10, 1, 2, byte(r.IntN(256))}).Prefix(9 + r.IntN(24))
		} else {
			b := netip.MustParseAddr("2001:db8:0:1::").As16()
			b[15] = byte(r.IntN(256))
			q, _ = netip.AddrFrom16(b).Prefix(33 + r.IntN(96))
		}
		var err error
		if r.IntN(2) == 0 {
			_, err = tab.Delete(q)
		} else {
			err = tab.Set(q, inner)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	<-done
	if torn.Load() > 0 || seen.Load() < 1000 {
		t.Errorf("%d of %d lookups were of neither version", torn.Load(), seen.Load())
	}
}

// TestFull checks that a full table returns ErrFull and stays unchanged.
func TestFull(t *testing.T) {
	p, tab := load(t, 1)
	r := rand.New(rand.NewPCG(3, 3))
	all := map[netip.Prefix]uint32{}
	for i := uint32(1); ; i++ {
		var b [16]byte
		for j := range b {
			b[j] = byte(r.Uint32())
		}
		q, _ := netip.AddrFrom16(b).Prefix(33 + r.IntN(96))
		err := tab.Set(q, i)
		if errors.Is(err, table.ErrFull) {
			if i < 1000 {
				t.Fatalf("full after %d", i)
			}
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all[q] = i
	}
	n := 0
	for q, v := range all {
		if lookup(t, p, tab, q.Addr()) != v {
			t.Fatalf("%s is lost", q)
		}
		if n++; n == 2000 {
			break
		}
	}
	many := make([]table.Entry, 0, len(all)+1)
	for q, v := range all {
		many = append(many, table.Entry{Prefix: q, Value: v})
	}
	if err := tab.Replace(many); !errors.Is(err, table.ErrFull) || !strings.Contains(err.Error(), fmt.Sprintf("%d IPv6 prefixes need more than 1 MiB", len(many))) {
		t.Errorf("both sets cannot have room: %v", err)
	}
	if tab.Len() != len(all) {
		t.Errorf("%d prefixes, want %d", tab.Len(), len(all))
	}
	for q := range all {
		if existed, err := tab.Delete(q); err != nil || !existed {
			t.Fatal(existed, err)
		}
	}
	if st := tab.Stats(); st.PageBytes != 0 {
		t.Errorf("after all are deleted: %+v", st)
	}
}

// write changes a table at random until it is killed. It prints each change before and after it.
func write() error {
	var m table.Maps
	for i, to := range []**ebpf.Map{&m.Head, &m.Index, &m.Pages} {
		var err error
		if *to, err = ebpf.NewMapFromFD(3 + i); err != nil {
			return err
		}
	}
	tab, err := table.Open(m)
	if err != nil {
		return err
	}
	seed, err := strconv.ParseUint(os.Args[2], 10, 64)
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(seed, 0))
	for {
		q, v := clustered(r, r.IntN(2) == 0), r.Uint32N(1000)
		fmt.Println(q, v)
		if v%3 == 0 {
			_, err = tab.Delete(q)
		} else {
			err = tab.Set(q, v)
		}
		if err != nil {
			return err
		}
		fmt.Println("done")
	}
}

// TestKilledWriter checks that a killed writer leaves whole changes and leaks no memory.
func TestKilledWriter(t *testing.T) {
	p, tab := load(t, 4)
	tab.Close()
	all := map[netip.Prefix]uint32{}
	r := rand.New(rand.NewPCG(rand.Uint64(), 4))
	rounds := 60
	if testing.Short() {
		rounds = 8
	}
	interrupted := 0
	for round := 0; round < rounds || interrupted == 0 && round < 10*rounds; round++ {
		doing := runWriter(t, "__write", []*ebpf.Map{p.Maps.Head, p.Maps.Index, p.Maps.Pages}, r, func(line string) {
			var q netip.Prefix
			var v uint32
			parse(t, line, &q, &v)
			apply(all, q, v)
		})
		var err error
		if tab, err = table.Open(p.Maps); err != nil {
			t.Fatal(err)
		}
		if doing != "" {
			interrupted++
			var q netip.Prefix
			var v uint32
			parse(t, doing, &q, &v)
			got, ok := tab.Get(q)
			switch {
			case got == all[q] && ok == (all[q] != 0): // not done yet
			case v%3 == 0 && !ok, v%3 != 0 && got == v:
				apply(all, q, v)
			default:
				t.Fatalf("round %d: %s has %d, was %d and was to be %d", round, q, got, all[q], v)
			}
		}
		n := 0
		for e := range tab.All() {
			if n++; all[e.Prefix] != e.Value {
				t.Fatalf("round %d: %v, want %d", round, e, all[e.Prefix])
			}
		}
		if n != len(all) || tab.Len() != n {
			t.Fatalf("round %d: %d prefixes, Len %d, want %d", round, n, tab.Len(), len(all))
		}
		for q := range all {
			a := within(r, q)
			if got, want := lookup(t, p, tab, a), longest(all, a); got != want {
				t.Fatalf("round %d: %s is %d, want %d", round, a, got, want)
			}
		}
		tab.Close()
	}
	if interrupted == 0 {
		t.Error("no writer was killed in the middle of a change: the test shows nothing")
	}
	if tab, _ = table.Open(p.Maps); tab != nil {
		for q := range all {
			if _, err := tab.Delete(q); err != nil {
				t.Fatal(err)
			}
		}
		if st := tab.Stats(); st.PageBytes != 0 {
			t.Errorf("memory is lost: %+v", st)
		}
	}
}

func parse(t *testing.T, line string, q *netip.Prefix, v *uint32) {
	t.Helper()
	at, value, _ := strings.Cut(line, " ")
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	*q, *v = netip.MustParsePrefix(at), uint32(n)
}

func apply(all map[netip.Prefix]uint32, q netip.Prefix, v uint32) {
	if v%3 == 0 {
		delete(all, q)
	} else {
		all[q] = v
	}
}

// runWriter runs a writer for a moment and kills it. It calls did for each completed change and
// returns the started one, if any.
func runWriter(t *testing.T, role string, maps []*ebpf.Map, r *rand.Rand, did func(line string)) (doing string) {
	t.Helper()
	c := exec.Command("/proc/self/exe", role, fmt.Sprint(r.Uint64()))
	c.Stderr = os.Stderr
	for _, x := range maps {
		f := os.NewFile(uintptr(dup(t, x.FD())), "map")
		defer f.Close()
		c.ExtraFiles = append(c.ExtraFiles, f)
	}
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	for began := false; ; {
		line, err := lines.ReadString('\n')
		if !began { // its start may take a while
			began = true
			time.AfterFunc(time.Duration(5+r.IntN(60))*time.Millisecond, func() { c.Process.Kill() })
		}
		if errors.Is(err, io.EOF) {
			break // the writer did not act on an incomplete last line
		} else if err != nil {
			t.Fatal(err)
		}
		line = strings.TrimSpace(line)
		if line == "done" {
			did(doing)
			doing = ""
		} else {
			doing = line
		}
	}
	c.Wait() // killed
	return doing
}

func dup(t *testing.T, fd int) int {
	t.Helper()
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
