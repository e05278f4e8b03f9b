// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// families are combinations of sockets, in a service's and in a sink's notation.
var families = []struct {
	name   string
	listen []string
	sink   []string
	v4, v6 bool // families of the sources
}{
	{"ipv4", []string{"udp 0.0.0.0:9991", "tcp 0.0.0.0:9991"}, []string{"udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"}, true, false},
	{"ipv6", []string{"udp6 [::]:9991", "tcp6 [::]:9991"}, []string{"udp6=[::]:9991", "tcp6=[::]:9991"}, false, true},
	{"dual", []string{"udp :9991", "tcp :9991"}, []string{"udp=[::]:9991", "tcp=[::]:9991"}, true, true},
}

// deaths is the total number of killed members, over all engines and families.
const deaths = 200

// TestKillsAndRestartsInAnyOrder kills, stops and restarts members in random order, under traffic over both protocols.
// Only the slot's member answers a source. Only sources of a slot without its member are rejected.
func TestKillsAndRestartsInAnyOrder(t *testing.T) {
	nstest.NeedRoot(t)
	each := (deaths + len(record.Engines)*len(families) - 1) / (len(record.Engines) * len(families))
	if testing.Short() { // on an emulated kernel
		each = 4
	}
	var wg sync.WaitGroup
	atOnce := make(chan struct{}, 6) // concurrent worlds, regardless of -parallel: they mostly wait
	if testing.Short() {
		atOnce = make(chan struct{}, 1)
	}
	for i, engine := range record.Engines {
		for j, family := range families {
			seed := uint64(10*i + j)
			slots := 2 + (i+j)%3
			wg.Go(func() {
				atOnce <- struct{}{}
				defer func() { <-atOnce }()
				t.Run(fmt.Sprintf("%s/%s", engine, family.name), func(t *testing.T) {
					p := newPlay(t, engine, family.listen, family.sink, slots, seed)
					p.sources(family.v4, family.v6)
					p.run(each)
				})
			})
		}
	}
	wg.Wait()
}

// play is a service in its own namespace, with its members and their history.
type play struct {
	*world
	ns    *netns.Handle
	rnd   *rand.Rand
	sinks []string // sockets of a member
	addrs []netip.Addr
	slot  map[netip.Addr]int

	actors []*actor // by slot
	died   int
	did    map[string]int

	mu     sync.Mutex
	owner  map[string]int // PID to slot, of all members so far
	outage [][]outage     // by slot
}

// actor is the member of a slot.
type actor struct {
	*sink
	pidFile string
}

// outage is a period of allowed rejections for a slot's sources.
type outage struct {
	from, to time.Time // to is zero during the outage
}

func newPlay(t *testing.T, engine spec.Engine, listen, sinks []string, slots int, seed uint64) *play {
	p := &play{rnd: rand.New(rand.NewPCG(seed, 1)), sinks: sinks, slot: map[netip.Addr]int{}, did: map[string]int{},
		owner: map[string]int{}, outage: make([][]outage, slots), actors: make([]*actor, slots)}
	name := strings.NewReplacer("/", "-", "_", "-").Replace(t.Name())
	var err error
	if p.ns, err = netns.Create(name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.ns.Close(); netns.Delete(name) })
	hash := uint32(seed)
	p.world = newWorld(t, spec.Options{Slots: slots, Engine: engine, Seed: &hash}, listen...)
	svc := &p.cfg.Services[0]
	svc.Netns = name
	for i := range slots {
		p.actors[i] = &actor{pidFile: fmt.Sprintf("%s/pid-%d", t.TempDir(), i)}
		svc.Members = append(svc.Members, service.Member{Slot: i, PIDFile: p.actors[i].pidFile})
	}
	return p
}

// sources assigns the source addresses to the namespace. Over IPv6 each source sends to its own address, because
// answers come from the address preferred by the kernel.
func (p *play) sources(v4, v6 bool) {
	if v4 {
		p.addrs = append(p.addrs, sources(24)...)
	}
	err := p.ns.Do(func() error {
		if err := netns.LoopbackUp(); err != nil || !v6 {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for i := range 24 {
			a := netip.MustParseAddr(fmt.Sprintf("fd00:1::%x", i+1))
			p.addrs = append(p.addrs, a)
			if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice()), Flags: unix.IFA_F_NODAD}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

// run plays until the given number of members has died.
func (p *play) run(deaths int) {
	p.apply()
	p.serve()
	for i := range p.actors {
		p.enter(i)
	}
	for _, place := range p.where(p.addrs...) {
		p.slot[place.Address] = place.Slot
	}
	asks := sync.OnceValue(p.ask())
	defer asks() // before the members exit with the test
	for p.died < deaths && !p.t.Failed() {
		p.act(p.rnd.IntN(len(p.actors)))
	}
	p.allAnswer()
	n := asks()
	if n < p.died { // an idle machine gets dozens per death
		p.t.Errorf("only %d answers: the test saw no traffic", n)
	}
	p.t.Logf("%d answers over %d deaths: %v", n, p.died, p.did)
}

// act triggers a random event in a slot, and sometimes also in the next slot.
func (p *play) act(slot int) {
	what := []string{"kill", "kill", "kill two", "kill two in turn", "term", "term", "stop", "stop and kill", "orphan", "replace", "holder"}[p.rnd.IntN(11)]
	if what == "orphan" && !exitHook() || what == "holder" && p.cfg.Services[0].Engine != spec.EngineReuseport {
		what = "kill"
	}
	p.did[what]++
	other := (slot + 1) % len(p.actors)
	switch what {
	case "kill":
		p.kill(slot)
	case "kill two":
		p.kill(slot)
		p.kill(other)
		p.enter(other)
	case "kill two in turn": // the first to die returns last
		p.kill(slot)
		p.rest(20)
		p.kill(other)
		p.rest(20)
		p.enter(other)
		p.rest(20)
	case "term":
		p.term(slot)
	case "stop":
		// It keeps its slot: its traffic waits and is not rejected.
		p.actors[slot].Signal(syscall.SIGSTOP)
		p.rest(150)
		p.actors[slot].Signal(syscall.SIGCONT)
		return
	case "stop and kill":
		p.actors[slot].Signal(syscall.SIGSTOP)
		p.rest(50)
		p.kill(slot)
	case "orphan":
		p.actors[slot].do("orphan")
		p.kill(slot)
	case "replace":
		p.replace(slot)
		return
	case "holder":
		p.killHolder()
		return
	}
	p.rest(20)
	p.enter(slot)
}

// rest waits a random time up to most milliseconds.
func (p *play) rest(most int) { time.Sleep(time.Duration(p.rnd.IntN(most)) * time.Millisecond) }

// down starts an outage of a slot, up ends it.
func (p *play) down(slot int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.outage[slot] = append(p.outage[slot], outage{from: time.Now()})
}

func (p *play) up(slot int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.outage[slot] {
		if o := &p.outage[slot][i]; o.to.IsZero() {
			o.to = time.Now()
		}
	}
}

func (p *play) kill(slot int) {
	p.down(slot)
	p.actors[slot].kill()
	p.died++
}

// term stops a member slowly: UDP closes first.
func (p *play) term(slot int) {
	a := p.actors[slot]
	a.do(fmt.Sprintf("term %dms", p.rnd.IntN(30)))
	p.down(slot)
	a.Signal(syscall.SIGTERM)
	a.Wait()
	p.died++
}

// replace starts the successor before the member exits, like a rolling restart.
func (p *play) replace(slot int) {
	a := p.actors[slot]
	old := a.sink
	a.sink = p.start(slot, p.sinks...)
	p.write(slot)
	p.rest(20)
	p.down(slot)
	old.kill()
	p.died++
	p.admit(slot)
}

// killHolder kills the socket holder. Traffic of present members continues, and the watcher restarts the holder.
func (p *play) killHolder() {
	old := p.holder()
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		p.t.Fatal(err)
	}
	deadline(p.t, func() bool { h := p.holder(); return h != old && h != 0 && p.state().Problem == "" })
}

// enter starts the member of a slot. It may open its sockets late, in any order, and before or after its pidfile is
// written.
func (p *play) enter(slot int) {
	a := p.actors[slot]
	switch p.rnd.IntN(3) {
	case 0:
		a.sink = p.start(slot, p.sinks...)
		p.write(slot)
	case 1:
		a.sink = p.start(slot)
		p.write(slot)
		for _, i := range p.rnd.Perm(len(p.sinks)) {
			p.rest(50)
			a.do("open " + p.sinks[i])
		}
	case 2:
		a.sink = p.start(slot, p.sinks[1])
		p.rest(20)
		p.write(slot)
		p.rest(20)
		a.do("open " + p.sinks[0])
	}
	p.admit(slot)
}

func (p *play) start(slot int, listens ...string) *sink {
	var s *sink
	err := p.ns.Do(func() error { s = startSink(p.t, listens...); return nil })
	if err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.owner[strconv.Itoa(s.pid())] = slot
	return s
}

// write writes a pidfile in place, like daemons do.
func (p *play) write(slot int) {
	a := p.actors[slot]
	if err := os.WriteFile(a.pidFile, fmt.Appendln(nil, a.pid()), 0o644); err != nil {
		p.t.Fatal(err)
	}
}

func (p *play) admit(slot int) {
	p.t.Helper()
	p.admitted(slot, p.actors[slot].pid())
	p.up(slot)
}
