// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/internal/netns"
	"golang.org/x/sys/unix"
)

// fewServices is the number of services while bindings and programs change under clients.
const fewServices = 64

// question is a target with its service in each of the two sets of bindings.
type question struct {
	target
	want [2]int
}

// scenes returns two sets of bindings, and targets covered by both in different ways. Longer prefixes
// appear and disappear within shorter ones, one port is replaced by every port, and neighbouring addresses
// are bound to other services.
func scenes() (sets [2][]bindings.Binding, ask []question) {
	for n := range 256 {
		proto, other := serviceProto(n%2), serviceProto(n%2+1)
		service := func(k int) int { return (n%2 + 2*(n/2+k)) % fewServices } // of the protocol of n
		q := question{at(20<<24|uint32(n)<<16|0x0101, boundPort, proto == unix.IPPROTO_TCP), [2]int{service(0), service(1)}}
		ask = append(ask, q)
		for i := range sets {
			bind := func(service int, bits int, port uint16, proto bindings.Proto) {
				p := netip.PrefixFrom(netip.AddrFrom4(q.addr), bits).Masked()
				sets[i] = append(sets[i], bindings.Binding{Service: serviceName(service), Prefix: p, Port: port, Proto: proto})
			}
			switch first := i == 0; n / 2 % 4 {
			case 0: // one host, two services
				bind(q.want[i], 32, boundPort, proto)
			case 1: // a host within a constant /16
				bind(q.want[1], 16, boundPort, proto)
				if first {
					bind(q.want[0], 32, boundPort, proto)
				}
			case 2: // every port, and one port with another beside it
				if first {
					bind(q.want[0], 24, 0, proto)
				} else {
					bind(q.want[1], 24, boundPort, proto)
					bind(service(2), 24, boundPort+1, proto)
				}
			case 3: // longer prefixes of another port and protocol hide nothing
				bits := 20
				if first {
					bits = 16
				}
				bind(q.want[i], bits, 0, proto)
				bind(service(2), 32, boundPort+1, proto)
				bind(n%2+1, 32, boundPort, other)
			}
		}
	}
	return sets, ask
}

// crowd returns n bindings of hosts far from the targets.
func (x *experiment) crowd(n int, part string) []bindings.Binding {
	s := &set{at: map[uint32]int{}, services: fewServices}
	r := x.rand("crowd", part)
	for len(s.hosts) < n {
		h := uint32(32<<24) + r.Uint32N(94<<24)
		if _, taken := s.at[h]; !taken {
			s.at[h] = len(s.hosts)
			s.hosts = append(s.hosts, h)
		}
	}
	return s.bindings(n)
}

// askers query every target again and again, until stopped.
type askers struct {
	x         *experiment
	questions []question
	inForce   atomic.Uint32 // bit n: set n may decide now
	stop      atomic.Bool
	wg        sync.WaitGroup

	mu      sync.Mutex
	answers int
	of      [2]int // answers by set, where the sets differ
	wrong   int    // answers of a service of no permitted set, or no answer
	err     error
	longest time.Duration
}

// perProto is the number of connecting clients, and of clients with datagrams.
const perProto = 2

func (x *experiment) startAsking(ns *netns.Handle, questions []question, inForce uint32) *askers {
	a := &askers{x: x, questions: questions}
	a.inForce.Store(inForce)
	for n := range 2 * perProto {
		a.wg.Go(func() {
			if err := ns.Do(func() error { return a.askAll(n) }); err != nil {
				a.mu.Lock()
				a.err = err
				a.mu.Unlock()
			}
		})
	}
	return a
}

// askAll queries the targets of one protocol. The pause leaves CPU time to the tested commands.
func (a *askers) askAll(n int) error {
	c, err := newClient()
	if err != nil {
		return err
	}
	defer c.close()
	r := a.x.rand("asker", n)
	for !a.stop.Load() {
		q := a.questions[r.IntN(len(a.questions)/2)*2+n%2]
		began, legal := time.Now(), a.inForce.Load()
		service, err := c.ask(q.target)
		legal |= a.inForce.Load()
		a.note(q, service, err, legal, time.Since(began))
		time.Sleep(200 * time.Microsecond)
	}
	return nil
}

func (a *askers) note(q question, service int, err error, legal uint32, took time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers++
	a.longest = max(a.longest, took)
	ok := false
	for i, want := range q.want {
		if err == nil && service == want {
			a.of[i]++
			ok = ok || legal>>i&1 == 1
		}
	}
	if ok {
		return
	}
	a.wrong++
	if err != nil {
		a.x.result.Note("%s: %v", q.target, err)
	} else {
		a.x.result.Note("%s: service %d answered; of %v the sets in %b are permitted", q.target, service, q.want, legal)
	}
}

func (a *askers) end() error {
	a.stop.Store(true)
	a.wg.Wait()
	return a.err
}

// change changes bindings and programs under clients.
func (x *experiment) change(ctx context.Context) error {
	var err error
	if x.few, err = x.site(ctx, "few", fewServices, true, nil); err != nil {
		return err
	}
	sets, questions := scenes()
	if err := x.upgradeUnder(ctx, x.few, sets[0], questions); err != nil {
		return fmt.Errorf("upgrading: %w", err)
	}
	if err := x.replaceUnder(ctx, x.few, sets, questions); err != nil {
		return fmt.Errorf("replacing: %w", err)
	}
	return nil
}

// upgradeUnder replaces programs: by another build and back, and by loading more bindings than the maps can
// hold. The latter creates maps of another layout and copies the bindings.
func (x *experiment) upgradeUnder(ctx context.Context, few *site, first []bindings.Binding, questions []question) error {
	if err := x.load(ctx, few, "replace", first); err != nil {
		return err
	}
	if err := x.weir.Rebuild(); err != nil {
		return err
	}
	was, err := few.programID()
	if err != nil {
		return err
	}
	a := x.startAsking(few.ns, questions, 1)
	replaced := 0
	for turn := 0; turn < x.upgrades && err == nil && ctx.Err() == nil; turn++ {
		steps := []func() error{
			func() error { _, err := x.weir.Upgrade(ctx); return err },
			func() error { _, err := x.weir.Upgrade(ctx); return err },
		}
		x.say("upgrading to another build and back under clients")
		if turn < len(x.rooms) {
			x.say("adding room for %d more bindings", x.rooms[turn])
			more := x.crowd(x.rooms[turn], fmt.Sprint("room", turn))
			steps = append([]func() error{func() error { return x.load(ctx, few, "load", more) }}, steps...)
		}
		for _, step := range steps {
			if err = step(); err != nil {
				break
			}
			var now uint32
			if now, err = few.programID(); err != nil {
				break
			}
			if now == was {
				err = fmt.Errorf("the program is still number %d, want a new one", was)
				break
			}
			was = now
			replaced++
			pause(ctx, 100*time.Millisecond)
		}
	}
	if endErr := a.end(); err == nil {
		err = endErr
	}
	if err != nil {
		return err
	}
	x.result.Set("programs_replaced", float64(replaced))
	x.result.Set("rooms_grown", float64(min(x.upgrades, len(x.rooms))))
	x.result.Set("answers_during_upgrade", float64(a.answers))
	x.result.Set("longest_ms_during_upgrade", milliseconds(a.longest))
	if a.answers < fewestAnswers {
		x.result.Note("only %d answers during the replacement of programs: no result", a.answers)
		return ctx.Err()
	}
	x.result.Set("misdirected_during_upgrade", float64(a.wrong))
	return ctx.Err()
}

// fewestAnswers is the minimum of answers for a result.
const fewestAnswers = 200

// replaceUnder replaces one whole set by the other, again and again.
func (x *experiment) replaceUnder(ctx context.Context, few *site, sets [2][]bindings.Binding, questions []question) error {
	files := [2]string{}
	for i := range sets {
		sets[i] = append(sets[i], x.crowd(x.swapped-len(sets[i]), fmt.Sprint("set", i))...)
		files[i] = filepath.Join(x.env.Dir, fmt.Sprintf("swap-%d.json", i))
		if err := writeFile(files[i], sets[i]); err != nil {
			return err
		}
	}
	if _, err := x.weir.Run(ctx, "bind", "replace", "--netns", few.name, "--lines", "0", files[0]); err != nil {
		return err
	}
	x.say("replacing %d bindings by %d others at once, again and again, under clients", len(sets[0]), len(sets[1]))
	a := x.startAsking(few.ns, questions, 1)
	var err error
	swaps := 0
	for end := time.Now().Add(x.swapping); (time.Now().Before(end) || swaps < 4) && err == nil && ctx.Err() == nil; {
		next := 1 - swaps%2
		a.inForce.Store(3)
		if _, err = x.weir.Run(ctx, "bind", "replace", "--netns", few.name, "--lines", "0", files[next]); err == nil {
			a.inForce.Store(1 << next)
			swaps++
			pause(ctx, 20*time.Millisecond)
		}
	}
	if endErr := a.end(); err == nil {
		err = endErr
	}
	if err != nil {
		return err
	}
	x.result.Set("replaced_whole_sets", float64(swaps))
	x.result.Set("replaced_bindings", float64(len(sets[0])))
	x.result.Set("answers_during_replace", float64(a.answers))
	x.result.Set("longest_ms_during_replace", milliseconds(a.longest))
	if a.answers < fewestAnswers || a.of[0] < a.answers/20 || a.of[1] < a.answers/20 {
		x.result.Note("%d answers, %d and %d of them from the two sets: no result", a.answers, a.of[0], a.of[1])
		return ctx.Err()
	}
	x.result.Set("misdirected_during_replace", float64(a.wrong))
	return ctx.Err()
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
