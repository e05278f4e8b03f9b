// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab/dispatch/bpf"
)

// skLookup is struct bpf_sk_lookup.
type skLookup struct {
	Cookie         uint64 // of the chosen socket
	Family         uint32
	Protocol       uint32
	RemoteIP4      [4]byte
	RemoteIP6      [16]byte
	RemotePort     [2]byte // network byte order
	_              [2]byte
	LocalIP4       [4]byte
	LocalIP6       [16]byte
	LocalPort      uint32 // host byte order
	IngressIfindex uint32
}

// testRun is the argument of bpf(BPF_PROG_TEST_RUN).
type testRun struct {
	ProgFd, Retval           uint32
	DataSizeIn, DataSizeOut  uint32
	DataIn, DataOut          uint64
	Repeat, Duration         uint32 // repetitions, ns for one
	CtxSizeIn, CtxSizeOut    uint32
	CtxIn, CtxOut            uint64
	Flags, CPU, BatchSize, _ uint32
}

const progTestRun = 10 // BPF_PROG_TEST_RUN

const errNoTestRun = unix.Errno(524) // ENOTSUPP, not meant for user space but returned to it

// runner runs an sk_lookup program without a packet.
type runner struct {
	prog *ebpf.Program
	attr testRun
	in   skLookup
	out  skLookup
}

func newRunner(p *ebpf.Program) *runner {
	r := &runner{prog: p}
	r.in = skLookup{Family: unix.AF_INET, RemoteIP4: clientAddress, RemotePort: [2]byte{0x9c, 0x40}}
	return r
}

// run looks a target up repeat times. It returns the kernel's measured time for one, and the cookie of the
// chosen socket, 0 for none.
func (r *runner) run(t target, repeat uint32) (ns uint32, cookie uint64, err error) {
	r.in.Protocol, r.in.LocalIP4, r.in.LocalPort = unix.IPPROTO_UDP, t.addr, uint32(t.port)
	if t.tcp {
		r.in.Protocol = unix.IPPROTO_TCP
	}
	for {
		r.attr = testRun{ProgFd: uint32(r.prog.FD()), Repeat: repeat,
			CtxSizeIn: uint32(unsafe.Sizeof(r.in)), CtxIn: uint64(uintptr(unsafe.Pointer(&r.in))),
			CtxSizeOut: uint32(unsafe.Sizeof(r.out)), CtxOut: uint64(uintptr(unsafe.Pointer(&r.out)))}
		_, _, errno := unix.Syscall(unix.SYS_BPF, progTestRun, uintptr(unsafe.Pointer(&r.attr)), unsafe.Sizeof(r.attr))
		runtime.KeepAlive(r)
		if errno == unix.EINTR { // a signal of Go's
			continue
		}
		if errno != 0 {
			return 0, 0, fmt.Errorf("test run of an sk_lookup program: %w", errno)
		}
		return r.attr.Duration, r.out.Cookie, nil
	}
}

// weirProgram returns the program attached to a namespace by weir.
func weirProgram(ns *netns.Handle) (*ebpf.Program, error) {
	attached, err := kernel.LookupPrograms(ns.FD())
	if err != nil {
		return nil, err
	}
	if len(attached) != 1 {
		return nil, fmt.Errorf("%d sk_lookup programs are attached, want weir's alone", len(attached))
	}
	return ebpf.NewProgramFromID(ebpf.ProgramID(attached[0].ID))
}

// interrupted is longer than any lookup: other work ran meanwhile.
const interrupted = 20_000 // ns

// times are the results of a program, one a round, in ns for a lookup.
type times map[string][]float64

// dice draws the targets of one kind of lookup.
type dice func(r *rand.Rand) target

// hit draws among the first n of a set, miss draws unbound hosts. Both draw either protocol.
func (s *set) hit(n int) dice {
	return func(r *rand.Rand) target {
		i := r.IntN(n)
		return at(s.hosts[i], boundPort, serviceProto(s.service(i)) == unix.IPPROTO_TCP)
	}
}

func (s *set) miss() dice {
	return func(r *rand.Rand) target { return at(s.unbound(r), boundPort, r.IntN(2) == 0) }
}

// random looks different targets up each time, and returns the mean without interrupted lookups.
func (x *experiment) random(p *runner, d dice, r *rand.Rand) (float64, error) {
	n, before := x.lookups, x.lookups/4
	targets := make([]target, before+n)
	for i := range targets {
		targets[i] = d(r)
	}
	sum, counted := uint64(0), 0
	for i, t := range targets {
		ns, _, err := p.run(t, 1)
		if err != nil {
			return 0, err
		}
		x.testRuns++
		switch {
		case i < before: // to bring the caches into this program's state
		case ns >= interrupted:
			x.interrupted++
		default:
			sum += uint64(ns)
			counted++
		}
	}
	if counted < n/2 {
		return 0, fmt.Errorf("%d of %d lookups were interrupted: this machine is too busy", n-counted, n)
	}
	return float64(sum) / float64(counted), nil
}

// hot looks one target up again and again within one system call, and returns the median over some targets.
func (x *experiment) hot(p *runner, d dice, r *rand.Rand) (float64, error) {
	var all []float64
	for range 5 {
		ns, _, err := p.run(d(r), x.repeat)
		if err != nil {
			return 0, err
		}
		all = append(all, float64(ns))
	}
	return median(all), nil
}

// alone keeps the caller on its thread, and stops Go's garbage collection. The collection would read all
// memory on every CPU while caches are measured.
func alone() (done func()) {
	runtime.LockOSThread()
	runtime.GC()
	was := debug.SetGCPercent(-1)
	return func() {
		debug.SetGCPercent(was)
		runtime.UnlockOSThread()
	}
}

// measureLookups times both programs in turn and sets the metrics of a size.
func (x *experiment) measureLookups(ctx context.Context, s *set, n int, size string) error {
	prog, err := weirProgram(x.many.ns)
	if err != nil {
		return err
	}
	defer prog.Close()
	x.say("looking up among %s bindings, by weir and by LPM_TRIE in turn", size)
	defer alone()()
	ways := []struct {
		name string
		p    *runner
	}{{"weir", newRunner(prog)}, {"trie", newRunner(x.trie.c.Programs["trie_dispatch"])}, {"nothing", newRunner(x.trie.c.Programs["no_dispatch"])}}
	r, found := x.rand("lookups", size), times{}
	for range x.rounds {
		for _, kind := range []string{"random_hit", "random_miss", "hot"} {
			for _, w := range ways {
				d, measure := s.hit(n), x.random
				switch kind {
				case "random_miss":
					d = s.miss()
				case "hot":
					measure = x.hot
				}
				ns, err := measure(w.p, d, r)
				if err != nil {
					return err
				}
				name := fmt.Sprintf("%s_%s_%s", w.name, kind, size)
				found[name] = append(found[name], ns)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		slices.Reverse(ways) // alternates the first one
	}
	for name, all := range found {
		x.result.Set("ns_"+name, median(all))
	}
	for _, kind := range []string{"random_hit", "random_miss", "hot"} {
		of := func(way string) []float64 { return found[way+"_"+kind+"_"+size] }
		floor := median(of("nothing"))
		x.result.Set("speedup_"+kind+"_"+size, medianRatio(of("trie"), of("weir")))
		x.result.Set("speedup_"+kind+"_"+size+"_less_floor", (median(of("trie"))-floor)/(median(of("weir"))-floor))
	}
	return nil
}

// measureGrowth times random hits of one service: among all bindings, and with a single binding, in turn.
// The growth then excludes the cost of many sockets. LPM_TRIE holds the bindings of the other set, with one
// socket of each protocol.
func (x *experiment) measureGrowth(ctx context.Context, one, other *set) error {
	all, err := weirProgram(x.many.ns)
	if err != nil {
		return err
	}
	defer all.Close()
	single, err := weirProgram(x.few.ns)
	if err != nil {
		return err
	}
	defer single.Close()
	mask := x.trie.c.Variables["destination_mask"]
	if err := mask.Set(uint32(1)); err != nil {
		return err
	}
	defer alone()()
	n := len(one.hosts)
	ways := []struct {
		name string
		p    *runner
		d    dice
	}{
		{"weir_1m", newRunner(all), one.hit(n)}, {"weir_1", newRunner(single), one.hit(1)},
		{"trie_1m", newRunner(x.trie.c.Programs["trie_dispatch"]), other.hit(n)},
		{"nothing", newRunner(x.trie.c.Programs["no_dispatch"]), one.hit(1)},
	}
	r, found := x.rand("growth"), times{}
	for range x.rounds {
		for _, w := range ways {
			ns, err := x.random(w.p, w.d, r)
			if err != nil {
				return err
			}
			found[w.name] = append(found[w.name], ns)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		slices.Reverse(ways)
	}
	floor := median(found["nothing"])
	x.result.Set("ns_weir_random_hit_one_service_1", median(found["weir_1"]))
	x.result.Set("ns_weir_random_hit_one_service_1m", median(found["weir_1m"]))
	x.result.Set("ns_trie_random_hit_one_service_1m", median(found["trie_1m"]))
	x.result.Set("speedup_random_hit_one_service_1m", medianRatio(found["trie_1m"], found["weir_1m"]))
	x.result.Set("growth_1_to_1m", medianRatio(found["weir_1m"], found["weir_1"]))
	x.result.Set("growth_1_to_1m_less_floor", (median(found["weir_1m"])-floor)/(median(found["weir_1"])-floor))
	return mask.Set(^uint32(0))
}

// compareChoices queries both programs for the same targets, half of them bound, and counts different
// choices.
func (x *experiment) compareChoices(s *set, n int) error {
	prog, err := weirProgram(x.many.ns)
	if err != nil {
		return err
	}
	defer prog.Close()
	ours, theirs, r := newRunner(prog), newRunner(x.trie.c.Programs["trie_dispatch"]), x.rand("choices", n)
	for i := range x.compared {
		d := s.hit(n)
		if i%2 == 1 {
			d = s.miss()
		}
		t := d(r)
		_, mine, err := ours.run(t, 1)
		if err != nil {
			return err
		}
		_, other, err := theirs.run(t, 1)
		if err != nil {
			return err
		}
		if mine != other || (mine != 0) != (i%2 == 0) {
			x.differ++
			x.result.Note("%s: weir chose socket %d, LPM_TRIE socket %d", t, mine, other)
		}
	}
	return nil
}

// trie is the other program with its maps.
type trie struct {
	c      *kernel.Collection
	filled int
}

func openTrie() (*trie, error) {
	spec, err := bpf.LoadTrie()
	if err != nil {
		return nil, err
	}
	c, err := kernel.Load(spec, []string{"trie_dispatch", "no_dispatch"}, nil)
	if err != nil {
		return nil, err
	}
	if _, _, err := newRunner(c.Programs["no_dispatch"]).run(target{}, 1); err != nil {
		c.Close()
		if errors.Is(err, errNoTestRun) {
			err = fmt.Errorf("this kernel has no test run of sk_lookup programs (Linux 5.13); the experiment needs it, weir does not: %w", ebpf.ErrNotSupported)
		}
		return nil, err
	}
	return &trie{c: c}, nil
}

// trieKey is struct binding_key without its length, because the length covers all its bits.
type trieKey [23]byte

type trieValue struct{ Destination, Prefixlen uint32 }

// fill adds bindings until the trie holds the first n of a set. It already holds the first some.
func (t *trie) fill(s *set, n int) (time.Duration, error) {
	var keys []trieKey
	var values []trieValue
	for i := t.filled; i < n; i++ {
		service := s.service(i)
		var k trieKey
		const bits = 8 + 16 + 128
		binary.NativeEndian.PutUint32(k[:], bits)
		k[4] = byte(serviceProto(service))
		binary.NativeEndian.PutUint16(k[5:], boundPort)
		k[17], k[18] = 0xff, 0xff
		addr := serviceAddr(s.hosts[i]).As4()
		copy(k[19:], addr[:])
		keys, values = append(keys, k), append(values, trieValue{uint32(service), bits})
	}
	if len(keys) == 0 {
		return 0, nil
	}
	begin := time.Now()
	if _, err := t.c.Maps["bindings"].BatchUpdate(keys, values, nil); err != nil {
		return 0, fmt.Errorf("fill LPM_TRIE: %w", err)
	}
	t.filled = n
	return time.Since(begin), nil
}

// mapMemory returns the kernel's charge for a program's maps with fitting names, in MB.
func mapMemory(p *ebpf.Program, fits func(name string) bool) (float64, error) {
	info, err := p.Info()
	if err != nil {
		return 0, err
	}
	ids, ok := info.MapIDs()
	if !ok {
		return 0, errors.New("this kernel does not report a program's maps")
	}
	total := uint64(0)
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return 0, err
		}
		info, err := m.Info()
		m.Close()
		if err != nil {
			return 0, err
		}
		if bytes, ok := info.Memlock(); ok && fits(info.Name) {
			total += bytes
		}
	}
	return float64(total) / 1e6, nil
}
