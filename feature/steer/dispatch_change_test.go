// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// many returns n unused bindings and a used one.
func many(t testing.TB, n int, name string) []bindings.Binding {
	out := []bindings.Binding{binding(t, name+" tcp 127.20.0.0/16 80")}
	for i := range n {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18 + byte(i>>16), byte(i >> 8), byte(i)}), 32)
		out = append(out, bindings.Binding{Service: fmt.Sprintf("s%d", i%50), Prefix: p, Proto: unix.IPPROTO_TCP, Port: 443})
	}
	return out
}

// asker asks over TCP until stopped and counts the answers.
func asker(t *testing.T, to string) (stop func() map[string]int) {
	seen := map[string]int{}
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-end:
				return
			default:
				seen[ask(t, "tcp", netip.MustParseAddr("127.0.0.1"), netip.MustParseAddrPort(to))]++
			}
		}
	}()
	return func() map[string]int {
		close(end)
		<-done
		return seen
	}
}

// TestDispatchReplaceAndGrow replaces all bindings, outgrows their maps and upgrades the program under traffic. Every
// connection reaches the service of the old or the new state. None is refused.
func TestDispatchReplaceAndGrow(t *testing.T) {
	w := newDispatchWorld(t)
	a, b := startSink(t, "tcp4=127.0.0.1:7041"), startSink(t, "tcp4=127.0.0.1:7042")
	w.register("a", a, "tcp 127.0.0.1:7041")
	w.register("b", b, "tcp 127.0.0.1:7042")
	w.bind("a tcp 127.20.0.0/16 80")
	replace := func(n int, name string) (d bindings.Diff) {
		w.locked(func(l *kernel.WriteLock) (err error) {
			d, err = bindings.ReplaceBindings(l, here(t), many(t, n, name))
			return err
		})
		return d
	}
	room := func() int {
		o, err := w.root.Open(record.EngineInstance(record.Scope(here(t)), spec.EngineSkLookup), "bound_many")
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		return engine.Room(o.Maps)
	}
	stop := asker(t, "127.20.3.4:80")
	if d := replace(3000, "b"); len(d.Added) != 3000 || len(d.Moved) != 1 || d.Moved[0].From != "a" {
		t.Errorf("%d added, moved %v", len(d.Added), d.Moved)
	}
	for range 5 {
		replace(3000, "a")
		replace(2000, "b")
	}
	if room() != engine.FewestBindings {
		t.Errorf("room for %d", room())
	}
	d := replace(engine.FewestBindings+1, "b") // larger maps
	if len(d.Added) != engine.FewestBindings+1-2000 || d.Same != 2001 || room() <= engine.FewestBindings {
		t.Errorf("%d added, %d the same; room for %d", len(d.Added), d.Same, room())
	}
	restore := otherObject(8)
	w.locked(upgradeAll)
	restore()
	w.locked(upgradeAll)
	d = replace(10, "b")
	if len(d.Removed) != engine.FewestBindings+1-10 {
		t.Errorf("%d removed", len(d.Removed))
	}
	seen := stop()
	if len(seen) != 2 || seen[fmt.Sprint(a.pid())] == 0 || seen[fmt.Sprint(b.pid())] == 0 {
		t.Errorf("answers: %v; a is %d, b %d", seen, a.pid(), b.pid())
	}
	w.reached(map[string]*sink{"127.20.3.4:80": b})
	if n := w.named(); len(n) != 12 || n["s3"].Bindings != 1 || n["b"].Bindings != 1 || n["a"].Bindings != 0 {
		t.Errorf("services: %v", n)
	}
}

// runBind changes bindings and exits at the given step: ROOT STEP PID…
func runBind(args []string) error {
	kerneltest.DieAtKind(args[1])
	root := kernel.OpenRoot(args[0])
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	at, err := service.ParseListen("tcp 127.0.0.1:7052")
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	if _, err := bindings.RegisterMember(context.Background(), root, "b", "", service.Member{PID: pid}, at); err != nil {
		return err
	}
	l, err := root.Lock(context.Background())
	if err != nil {
		return err
	}
	defer l.Unlock()
	p := netip.MustParsePrefix("127.20.0.0/16")
	q := netip.MustParsePrefix("127.20.128.0/17")
	const tcp = unix.IPPROTO_TCP
	if _, err := bindings.Bind(l, ns, bindings.Binding{Service: "b", Prefix: p, Port: 80, Proto: tcp}); err != nil { // previously bound to a
		return err
	}
	if _, err := bindings.Bind(l, ns, bindings.Binding{Service: "a", Prefix: q, Port: 80, Proto: tcp}); err != nil {
		return err
	}
	if err := bindings.Unbind(l, ns, bindings.Binding{Service: "a", Prefix: q, Port: 80, Proto: tcp}); err != nil {
		return err
	}
	var all []bindings.Binding
	for i := range engine.FewestBindings + 1 {
		all = append(all, bindings.Binding{Service: "s", Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), 32), Port: 443, Proto: tcp})
	}
	all = append(all, bindings.Binding{Service: "a", Prefix: p, Port: 80, Proto: tcp})
	if _, err := bindings.ReplaceBindings(l, ns, all); err != nil {
		return err
	}
	if _, err := bindings.ReplaceBindings(l, ns, all[len(all)-1:]); err != nil {
		return err
	}
	_, err = bindings.UnregisterSockets(l, ns, "b")
	return err
}

// TestDispatchKilledAtEveryStep kills every change at any step under traffic. Each connection reaches the service of
// the old or the new state. The next command finds consistent bindings, counts and sockets.
func TestDispatchKilledAtEveryStep(t *testing.T) {
	a, b := startSink(t, "tcp4=127.0.0.1:7051"), startSink(t, "tcp4=127.0.0.1:7052")
	both := []string{fmt.Sprint(a.pid()), fmt.Sprint(b.pid())}
	const every = 2 // fraction of the steps, others in every run: each loads the largest program several times
	for step := rand.IntN(every * stride()); ; step += every * stride() {
		w := newDispatchWorld(t)
		w.register("a", a, "tcp 127.0.0.1:7051")
		w.bind("a tcp 127.20.0.0/16 80")
		stop := asker(t, "127.20.3.4:80")
		died := kerneltest.Killed(t, nstest.Child("bind", w.root.Path(), step, b.pid()))
		for who, n := range stop() {
			if !slices.Contains(both, who) {
				t.Errorf("step %d: answered %d times by %s", step, n, who)
			}
		}
		w.checkDispatch(step)
		w.bind("a tcp 127.20.0.0/16 80")
		w.reached(map[string]*sink{"127.20.3.4:80": a})
		w.remove()
		if died == "" {
			t.Logf("killed within %d steps", step)
			if step < 20 {
				t.Errorf("only %d steps: the change is not what the test means", step)
			}
			return
		}
	}
}

// checkDispatch runs the recovery of the next command and compares the result.
func (w *world) checkDispatch(step int) {
	w.t.Helper()
	w.locked(engine.Recover)
	w.bind("z tcp 127.99.0.0/16 80")
	w.unbind("z tcp 127.99.0.0/16 80")
	all, err := bindings.Bindings(context.Background(), w.root, record.Scope(here(w.t)))
	if err != nil {
		w.t.Fatal(err)
	}
	counts := map[string]int{}
	for _, b := range all {
		counts[b.Service]++
	}
	for name, n := range w.named() {
		if n.Bindings != counts[name] {
			w.t.Errorf("step %d: %s counts %d bindings and has %d", step, name, n.Bindings, counts[name])
		}
		delete(counts, name)
	}
	if len(counts) > 0 {
		w.t.Errorf("step %d: bound to services that are not there: %v", step, counts)
	}
}

// TestDispatchAtOnce: two concurrent commands wait for each other.
func TestDispatchAtOnce(t *testing.T) {
	w := newDispatchWorld(t)
	w.bind("a tcp 127.20.0.0/16 1")
	done := make(chan error)
	for i := range 4 {
		go func() {
			var err error
			for j := range 25 {
				var l *kernel.WriteLock
				if l, err = w.root.Lock(context.Background()); err != nil {
					break
				}
				ns, _ := netns.Current()
				_, err = bindings.Bind(l, ns, bindings.Binding{Service: fmt.Sprint("s", i), Prefix: netip.MustParsePrefix("127.20.0.0/16"), Port: uint16(100*i + j + 2), Proto: unix.IPPROTO_TCP})
				ns.Close()
				l.Unlock()
				if err != nil {
					break
				}
			}
			done <- err
		}()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	w.checkDispatch(0)
	if all, err := bindings.Bindings(context.Background(), w.root, record.Scope(here(t))); err != nil || len(all) != 101 {
		t.Errorf("%d bindings, %v", len(all), err)
	}
}
