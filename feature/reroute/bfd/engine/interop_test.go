// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// side is a namespace with sessions in the kernel, at the other end of a cable to a daemon.
type side struct {
	testing.TB
	here, there *netns.Handle
	root        *kernel.Root
	e           *Engine
	stop        func() // stops Run
	index       int
}

func newSide(t testing.TB) *side {
	t.Helper()
	nstest.NeedRoot(t)
	if err := kernel.Require(Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	s := &side{TB: t, here: nstest.NewNetns(t), there: nstest.NewNetns(t), root: kernel.OpenRoot(nstest.BPFFS + "/" + strings.ReplaceAll(t.Name(), "/", "-"))}
	nstest.Cable(t, s.here, "w0", s.there, "w0")
	nstest.Address(t, s.here, "w0", netip.MustParsePrefix("10.9.0.1/24"), netip.MustParsePrefix("fd09::1/64"))
	nstest.Address(t, s.there, "w0", netip.MustParsePrefix("10.9.0.2/24"), netip.MustParsePrefix("fd09::2/64"))
	s.index = nstest.Ifindex(t, s.here, "w0")
	var err error
	if s.e, err = Open(t.Context(), s.root, s.here, tick); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan struct{})
	go func(e *Engine) { e.Run(ctx, func(err error) { t.Error(err) }); close(ran) }(s.e)
	s.stop = func() { cancel(); <-ran }
	t.Cleanup(func() {
		s.stop()
		s.e.Close()
		l, err := s.root.Lock(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Unlock()
		if err := Remove(l); err != nil {
			t.Error(err)
		}
		if err := liveness.Remove(context.Background(), l); err != nil {
			t.Error(err)
		}
	})
	return s
}

// Times of sessions with daemons. Daemons stall for seconds on a busy machine, so the detection time is long.
const (
	every = 40 * time.Millisecond
	times = 125
	tick  = 2500 * time.Microsecond
)

// session returns a session with the daemon.
func (s *side) session(n int, local, peer string) Session {
	return Session{Config: bfd.Config{Discriminator: uint32(0x77000000 + n), Multiplier: times, DesiredTx: every, RequiredRx: every},
		Local: netip.MustParseAddr(local), Peer: netip.MustParseAddr(peer), Ifindex: s.index, SourcePort: uint16(bfd.FirstSourcePort + n)}
}

func (s *side) put(all ...Session) {
	s.Helper()
	if err := s.e.Put(s.Context(), all...); err != nil {
		s.Fatal(err)
	}
}

func (s *side) status(of Session) Status {
	s.Helper()
	st, there, err := s.e.Status(of.Discriminator)
	if err != nil || !there {
		s.Fatalf("%t, %v", there, err)
	}
	return st
}

// up waits until all sessions are up, or none is.
func (s *side) up(want bool, all ...Session) {
	s.Helper()
	for _, x := range all {
		nstest.Until(s, fmt.Sprintf("the session with %s is up: %t", x.Peer, want), func() bool { return (s.status(x).State == bfd.Up) == want })
	}
}

// agree waits until both ends use the intervals of an up session. Before, the daemon's interval is a second (RFC 5880
// section 6.8.3), and it is detected as silent only after 125 of them.
func (s *side) agree(all ...Session) {
	s.Helper()
	for _, x := range all {
		nstest.Until(s, "intervals are agreed on", func() bool {
			st := s.status(x)
			return st.Interval == every && st.Detection == times*every && !st.Polling
		})
	}
}

// cut drops all packets arriving at the daemon's side.
func (s *side) cut() link.Link {
	s.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}}) // TC_ACT_SHOT
	if err != nil {
		s.Fatal(err)
	}
	defer prog.Close()
	var l link.Link
	index := nstest.Ifindex(s, s.there, "w0")
	err = s.there.Do(func() (err error) {
		l, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		return err
	})
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { l.Close() }) // also keeps the link referenced: without a reference it would end with the next garbage collection
	return l
}

// ran returns the engine's running time. It sends nothing for the time this machine stalled.
func (s *side) ran() (d time.Duration) {
	s.Helper()
	st, err := liveness.ReadState(s.Context(), s.root)
	if err != nil {
		s.Fatal(err)
	}
	for _, l := range st.TimerLoops { // each of two visits every session
		d = max(d, time.Duration(l.Ticks)*tick)
	}
	return d
}

// sends reports whether sessions send at the right rate for two seconds. The last try must succeed.
func (s *side) sends(last bool, all ...Session) bool {
	s.Helper()
	right := true
	// The counters at a moment are read between two readings of the clock.
	type look struct {
		before, after time.Time
		ran           time.Duration // the engine's running time, without stalls
		Status
	}
	at := func(x Session) look {
		before, ran := time.Now(), s.ran()
		st := s.status(x)
		return look{before, time.Now(), ran, st}
	}
	var begin []look
	for _, x := range all {
		begin = append(begin, at(x))
	}
	time.Sleep(2 * time.Second)
	for i, x := range all {
		end := at(x)
		sent, took, atMost := end.Out-begin[i].Out, end.before.Sub(begin[i].after), end.after.Sub(begin[i].before)
		ran := min(took, end.ran-begin[i].ran)
		s.Logf("%s: %d sent, %d came in %v, of which the engine ran for %v; down %d times", x.Peer, sent, end.In-begin[i].In, took, ran, end.Downs-begin[i].Downs)
		if sent >= uint64(ran/(every*5/4)) && sent <= uint64(atMost/(every*7/10)) {
			continue
		}
		right = false
		if last {
			s.Errorf("%d packets sent to %s in %v, of which the engine ran for %v: want one in 75 to 100 %% of %v", sent, x.Peer, took, ran, every)
		}
	}
	return right || last
}

// talk brings sessions with a daemon up, keeps them up, cuts the daemon off, and brings them up again.
func (s *side) talk(all ...Session) {
	s.Helper()
	s.put(all...)
	s.up(true, all...)
	s.agree(all...)
	before := make([]Status, len(all))
	for i, x := range all {
		before[i] = s.status(x)
	}
	for tries := 1; !s.sends(tries == 5, all...); tries++ { // a stalled machine sends nothing, but not in every try
	}
	for i, x := range all {
		st := s.status(x)
		if st.Downs != before[i].Downs {
			s.Errorf("the session with %s was down", x.Peer)
		}
		if st.NotAuthentic+st.Malformed > 0 {
			s.Errorf("%+v", st)
		}
	}
	l := s.cut()
	s.up(false, all...)
	for _, x := range all {
		if st := s.status(x); st.Diag != bfd.NeighbourDown && st.Diag != bfd.TimeExpired {
			s.Errorf("%s: %s", x.Peer, st.Diag)
		}
	}
	l.Close()
	s.up(true, all...)
	s.agree(all...)
}

// Sessions with a real bfdd, over IPv4 and IPv6.
func TestWithBFDD(t *testing.T) {
	frrtest.Need(t, "bfdd")
	s := newSide(t)
	r := frrtest.Start(t, s.there, "far", map[string]string{"bfdd": `bfd
 peer 10.9.0.1 local-address 10.9.0.2 interface w0
  detect-multiplier 125
  receive-interval 40
  transmit-interval 40
 exit
 peer fd09::1 local-address fd09::2 interface w0
  detect-multiplier 125
  receive-interval 40
  transmit-interval 40
 exit
`})
	four, six := s.session(1, "10.9.0.1", "10.9.0.2"), s.session(2, "fd09::1", "fd09::2")
	s.talk(four, six)
	peers := func() string { return strings.ReplaceAll(r.Vtysh("show bfd peers json"), " ", "") }
	nstest.Until(s, "bfdd shows both up", func() bool { return strings.Count(peers(), `"status":"up"`) == 2 })
	// A slower end agrees by a poll sequence and stays up.
	four.DesiredTx, four.RequiredRx = 70*time.Millisecond, 50*time.Millisecond
	downs := s.status(four).Downs
	s.put(four)
	nstest.Until(s, "other intervals are agreed on", func() bool {
		st := s.status(four)
		return st.Interval == 70*time.Millisecond && st.Detection == times*50*time.Millisecond && !st.Polling && strings.Contains(peers(), `"remote-transmit-interval":70`)
	})
	if st := s.status(four); st.Downs != downs {
		t.Errorf("down %d times on the way", st.Downs-downs)
	}
	// A shutdown is announced.
	six.Down = true
	s.put(six)
	nstest.Until(s, "bfdd sees that it is shut down", func() bool { return strings.Contains(peers(), "neighborsignaledsessiondown") })
	// The kernel continues without the process.
	s.stop()
	s.e.Close()
	time.Sleep(500 * time.Millisecond)
	again, err := Open(t.Context(), s.root, s.here, tick)
	if err != nil {
		t.Fatal(err)
	}
	s.e = again
	if st := s.status(four); st.State != bfd.Up || st.Downs != downs {
		t.Errorf("%+v", st)
	}
}

// Sessions with a real BIRD, without and with authentication.
func TestWithBIRD(t *testing.T) {
	bird, err := exec.LookPath("bird")
	if err != nil {
		t.Skip("need: tool bird (Debian package bird2)")
	}
	for name, c := range map[string]struct {
		text string
		key  *bfd.Key
	}{
		"plain":      {"", nil},
		"keyed":      {`authentication keyed sha1; password "a secret" { id 9; };`, &bfd.Key{Type: bfd.KeyedSHA1, ID: 9, Secret: []byte("a secret")}},
		"meticulous": {`authentication meticulous keyed sha1; password "another one" { id 3; };`, &bfd.Key{Type: bfd.MeticulousSHA1, ID: 3, Secret: []byte("another one")}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSide(t)
			dir := t.TempDir()
			conf := filepath.Join(dir, "bird.conf")
			text := fmt.Sprintf("log \"%s/log\" all;\nrouter id 10.9.0.2;\nprotocol device {}\nprotocol bfd {\n interface \"w0\" { interval 40 ms; multiplier 125; %s };\n neighbor 10.9.0.1 dev \"w0\";\n neighbor fd09::1 dev \"w0\";\n}\n", dir, c.text)
			if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(bird, "-f", "-c", conf, "-s", filepath.Join(dir, "ctl"), "-P", filepath.Join(dir, "pid"))
			if err := s.there.Do(cmd.Start); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
				if said, _ := os.ReadFile(dir + "/log"); t.Failed() {
					t.Logf("BIRD said %.3000s", said)
				}
			})
			four, six := s.session(1, "10.9.0.1", "10.9.0.2"), s.session(2, "fd09::1", "fd09::2")
			four.Key, six.Key = c.key, c.key
			s.talk(four, six)
			if c.key == nil {
				return
			}
			wrong := *c.key
			wrong.Secret = []byte("not that one")
			four.Key = &wrong
			s.put(four)
			s.up(false, four)
			if st := s.status(four); st.NotAuthentic == 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}

// TestRestartOfKeyedBIRD kills a neighbor and starts it again. Its new sequence numbers are accepted after twice the
// detection time of the old session, not of the new one (RFC 5880 section 6.8.1).
func TestRestartOfKeyedBIRD(t *testing.T) {
	restartBIRD(t, `authentication keyed sha1; password "a secret" { id 9; };`, &bfd.Key{Type: bfd.KeyedSHA1, ID: 9, Secret: []byte("a secret")})
}

// Without a key the new BIRD's port is accepted after the detection time.
func TestRestartOfBIRD(t *testing.T) { restartBIRD(t, "", nil) }

func restartBIRD(t *testing.T, authentication string, key *bfd.Key) {
	bird, err := exec.LookPath("bird")
	if err != nil {
		t.Skip("need: tool bird (Debian package bird2)")
	}
	s := newSide(t)
	dir := t.TempDir()
	conf := filepath.Join(dir, "bird.conf")
	text := "router id 10.9.0.2;\nprotocol device {}\nprotocol bfd {\n interface \"w0\" { interval 100 ms; multiplier 5; " + authentication + " };\n neighbor 10.9.0.1 dev \"w0\";\n}\n"
	if err := os.WriteFile(conf, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	start := func() *exec.Cmd {
		t.Helper()
		cmd := exec.Command(bird, "-f", "-c", conf, "-s", filepath.Join(dir, "ctl"), "-P", filepath.Join(dir, "pid"))
		if err := s.there.Do(cmd.Start); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	cmd := start()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	x := s.session(1, "10.9.0.1", "10.9.0.2")
	x.Multiplier, x.DesiredTx, x.RequiredRx = 5, 100*time.Millisecond, 100*time.Millisecond
	x.Key = key
	s.put(x)
	for _, sig := range []os.Signal{os.Kill, syscall.SIGTERM} {
		s.up(true, x)
		nstest.Until(s, "the session goes by its intervals", func() bool { return s.status(x).Detection == 500*time.Millisecond })
		refused := s.status(x).NotAuthentic
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		ended := time.Now()
		cmd = start()
		s.up(false, x)
		s.up(true, x)
		// A second of silence plus BIRD's start: it sends once a second.
		if took := time.Since(ended); took > 6*time.Second {
			t.Errorf("%v: up %v after the neighbor ended, %d packets refused", sig, took, s.status(x).NotAuthentic-refused)
		} else {
			t.Logf("%v: up %v after the neighbor ended, %d packets refused", sig, took, s.status(x).NotAuthentic-refused)
		}
	}
}

// TestRestartOfBFDD kills bfdd and starts it again. The new one has another discriminator, and the old port or
// another one. Without a key it is accepted after the detection time.
func TestRestartOfBFDD(t *testing.T) {
	frrtest.Need(t, "bfdd")
	s := newSide(t)
	start := func(name string) *frrtest.Router {
		return frrtest.Start(t, s.there, name, map[string]string{"bfdd": `bfd
 peer 10.9.0.1 local-address 10.9.0.2 interface w0
  detect-multiplier 5
  receive-interval 100
  transmit-interval 100
 exit
`})
	}
	r, second := start("far"), time.Now().Unix()
	x := s.session(1, "10.9.0.1", "10.9.0.2")
	x.Multiplier, x.DesiredTx, x.RequiredRx = 5, 100*time.Millisecond, 100*time.Millisecond
	s.put(x)
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		s.up(true, x)
		nstest.Until(s, "the session goes by its intervals", func() bool { return s.status(x).Detection == 500*time.Millisecond })
		before := s.status(x)
		r.Signal("bfdd", sig)
		ended := time.Now()
		// The clock in seconds is the seed of bfdd's discriminators: two starts in one second choose the same.
		nstest.Until(s, "the next second begins", func() bool { return time.Now().Unix() > second })
		r, second = start("far-"+sig.String()), time.Now().Unix()
		s.up(false, x)
		s.up(true, x)
		after := s.status(x)
		t.Logf("%v: up %v after bfdd ended, %d packets refused", sig, time.Since(ended), after.NotAuthentic-before.NotAuthentic)
		// Its first packets come once a second. After a farewell up to three of them may be rejected.
		if took := time.Since(ended); took > 10*time.Second || after.Remote.Discriminator == before.Remote.Discriminator {
			t.Errorf("%v: up %v after bfdd ended, by %+v", sig, took, after.Remote)
		}
	}
}
