// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"upgrade": playUpgrade, "remove": playRemove})
	nstest.Main(m)
}

var (
	service4 = netip.MustParseAddrPort("10.55.0.1:9000")
	service6 = netip.MustParseAddrPort("[fd55::1]:9000")
)

func prefix(format string, a ...any) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf(format, a...))
}

// TestSpread checks that new flows of both families are spread over the hosts, and each stays at
// its host.
func TestSpread(t *testing.T) {
	sc := newScene(t)
	client, hosts, f := sc.client, sc.hosts, sc.f
	for id, at := range []netip.AddrPort{service4, service6} {
		serve(t, hosts, at)
		of := map[byte]int{}
		for range 40 {
			c := dial(t, client, at)
			first, err := ask(c, "a", patience)
			if err != nil {
				t.Fatal(err)
			}
			again, err := ask(c, "b", patience)
			if err != nil || first[0] != again[0] {
				t.Fatalf("%q, then %q, %v", first, again, err)
			}
			of[first[0]]++
			fl, err := f.Flow(keyOfConn(c, id))
			if err != nil || int(fl.Owner) != int(first[0]-'0') || fl.In < 3 || fl.Out < 2 {
				t.Errorf("flow %+v, %v, served by %s", fl, err, first)
			}
		}
		if of['1'] < 5 || of['2'] < 5 {
			t.Errorf("40 flows: %v", of)
		}
	}
	c, err := f.Counts()
	if err != nil || c.Learned != 80 || c.Mute+c.NoBackend+c.UnknownSource+c.Full != 0 {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestPark checks that packets of a buffered flow wait, and arrive in order after Flush.
func TestPark(t *testing.T) {
	sc := newScene(t)
	client, hosts, f := sc.client, sc.hosts, sc.f
	serve(t, hosts, service4)
	c := dial(t, client, service4)
	first, err := ask(c, "a", patience)
	if err != nil {
		t.Fatal(err)
	}
	k := keyOfConn(c, 0)
	if err := f.Buffer(k); err != nil {
		t.Fatal(err)
	}
	if got, err := ask(c, "b", 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%q, %v: want no answer", got, err)
	}
	for _, word := range []string{"c", "d", "e"} {
		if _, err := io.WriteString(c, word); err != nil {
			t.Fatal(err)
		}
	}
	waited, err := f.Flush(k)
	if err != nil || waited == 0 {
		t.Fatalf("%d waited, %v", waited, err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 0, 16)
	for want := 4; want > 0; {
		b := make([]byte, 16)
		n, err := c.Read(b)
		if err != nil {
			t.Fatal(err, string(got))
		}
		for _, x := range b[:n] {
			if x != first[0] {
				got = append(got, x)
				want--
			}
		}
	}
	if string(got) != "bcde" {
		t.Errorf("got %q", got)
	}
}

// TestMute checks that packets of a host without the flow are dropped, including its resets.
func TestMute(t *testing.T) {
	sc := newScene(t)
	client, hosts, f := sc.client, sc.hosts, sc.f
	serve(t, hosts, service4)
	c := dial(t, client, service4)
	if _, err := ask(c, "a", patience); err != nil {
		t.Fatal(err)
	}
	k := keyOfConn(c, 0)
	var from move.Backend
	moved, err := f.Change(k, func(fl *Flow) {
		from = fl.Owner
		fl.Flow = move.Flow{Owner: 3 - from, Epoch: fl.Epoch + 1, Predecessor: from, To: from, Nonce: fl.Nonce} // with To set, resets are dropped
	})
	if err != nil {
		t.Fatal(err)
	}
	// The other host has no such socket, so it answers by a reset.
	if got, err := ask(c, "b", 300*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%q, %v: want no answer", got, err)
	}
	if fl, err := f.Flow(k); err != nil || fl.Flow != moved.Flow {
		t.Errorf("%+v, %v: a reset that does not pass is no word", fl, err)
	}
	if _, err := f.Change(k, func(fl *Flow) {
		fl.Flow = move.Flow{Owner: from, Epoch: fl.Epoch + 1, Predecessor: 3 - from}
	}); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 8)
	if n, err := c.Read(b); err != nil || string(b[1:n]) != "b" {
		t.Errorf("back at its owner: %q, %v", b[:n], err)
	}
	if fl, err := f.Flow(k); err != nil || fl.Predecessor != 0 {
		t.Errorf("%+v, %v: the owner has spoken, nobody before it may have the flow", fl, err)
	}
	if n, err := f.Counts(); err != nil || n.NoReset == 0 {
		t.Errorf("%+v, %v", n, err)
	}
}

// TestForget checks that ended flows are forgotten, and moving ones stay.
func TestForget(t *testing.T) {
	sc := newScene(t)
	client, hosts, f := sc.client, sc.hosts, sc.f
	serve(t, hosts, service4)
	var keys []Key
	for i := range 3 {
		c := dial(t, client, service4)
		if _, err := ask(c, "a", patience); err != nil {
			t.Fatal(err)
		}
		keys = append(keys, keyOfConn(c, 0))
		if i > 0 {
			c.Close()
		}
	}
	if _, err := f.Change(keys[2], func(fl *Flow) { fl.To = 3 - fl.Owner }); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the flow has ended", func() bool { fl, err := f.Flow(keys[1]); return err == nil && fl.Ended })
	n, err := f.Forget(0, time.Hour)
	if err != nil || n != 1 {
		t.Errorf("%d forgotten, %v", n, err)
	}
	for i, k := range keys {
		if _, err := f.Flow(k); (err == nil) != (i != 1) {
			t.Errorf("flow %d: %v", i, err)
		}
	}
}

// TestChange checks that a change is repeated if the flow changed meanwhile.
func TestChange(t *testing.T) {
	f := newScene(t).f
	k := Key{Client: netip.MustParseAddrPort("10.1.0.2:1"), Service: 0}
	if err := f.Learn(k, 1, 7); err != nil {
		t.Fatal(err)
	}
	known, err := f.Flow(k)
	if err != nil || known.Nonce == 0 {
		t.Fatalf("%+v, %v: want a birth", known, err)
	}
	asked := 0
	got, err := f.Change(k, func(fl *Flow) {
		if asked++; asked == 1 {
			if _, err := f.Change(k, func(fl *Flow) { fl.Epoch = 9 }); err != nil {
				t.Error(err)
			}
		}
		fl.To = 5
	})
	if want := (move.Flow{Owner: 1, To: 5, Epoch: 9, Nonce: known.Nonce}); err != nil || got.Flow != want || asked != 2 {
		t.Errorf("%+v, asked %d times, %v", got, asked, err)
	}
	if _, err := f.Change(Key{Client: k.Client, Service: 3}, func(*Flow) {}); !errors.Is(err, errNoFlow) {
		t.Errorf("%v", err)
	}
}

// TestNoDevice checks the error about a missing buffer device.
func TestNoDevice(t *testing.T) {
	nstest.NeedRoot(t)
	if err := kernel.Require(Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	do(t, nstest.NewNetns(t), func() error {
		f, err := New(Options{BufferDevice: "a name that is too long for a device"})
		if err == nil || !strings.Contains(err.Error(), "buffer device") {
			t.Errorf("%v, %v", f, err)
		}
		return nil
	})
}
