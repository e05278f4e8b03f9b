// SPDX-License-Identifier: Apache-2.0

package onehost

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/weir-project/weir/lab/routers"
)

// session returns a router's possible stream: its beginning, and n announcements.
func session(n uint32) (b []byte) {
	d := routers.NewDevice(1, netip.MustParseAddr("10.99.0.1"))
	now := time.Unix(1, 0)
	b = d.PeerUp(d.Initiation(nil), 1, now)
	for i := range n {
		b = d.RouteMonitoring(b, i, i/16, now)
	}
	return d.Statistics(b, 16, now)
}

// A book does not depend on the pieces of the stream, or on the continuing process.
func TestBookGoesOn(t *testing.T) {
	stream := session(50)
	want := newBook()
	if rest, err := want.add(stream); rest != 0 || err != nil {
		t.Fatal(rest, err)
	}
	if want.Messages != 53 || want.Bytes != uint64(len(stream)) || want.Initiations != 1 || want.ups() != 1 || want.routes() != 16 || want.Statistics != 1 {
		t.Errorf("%+v", want)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		b := newBook()
		var in []byte
		for at := 0; at < len(stream); {
			n := min(1+r.IntN(300), len(stream)-at)
			in = append(in, stream[at:at+n]...)
			at += n
			rest, err := b.add(in)
			if err != nil {
				t.Fatal(err)
			}
			in = in[len(in)-rest:]
			state, err := b.state()
			if err == nil {
				b, err = restore(state)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if !reflect.DeepEqual(b, want) || !b.sameTables(want) {
			t.Fatalf("%+v, want %+v", b, want)
		}
	}
}

// A stream with a missing or doubled byte is detected as broken, or has another book.
func TestBookSeesWrongStreams(t *testing.T) {
	stream := session(20)
	want := newBook()
	if _, err := want.add(stream); err != nil {
		t.Fatal(err)
	}
	for i := range stream {
		for what, wrong := range map[string][]byte{
			"lost":    slices.Delete(slices.Clone(stream), i, i+1),
			"doubled": slices.Insert(slices.Clone(stream), i, stream[i]),
		} {
			b := newBook()
			rest, err := b.add(wrong)
			if err != nil && !errors.Is(err, errBroken) {
				t.Fatal(err)
			}
			if err == nil && rest == 0 && b.Hash == want.Hash {
				t.Fatalf("byte %d is %s without an error", i, what)
			}
		}
	}
}

// A repeated table counts as a dump.
func TestBookCountsDumps(t *testing.T) {
	b := newBook()
	once := session(16)
	if _, err := b.add(append(slices.Clone(once), once...)); err != nil {
		t.Fatal(err)
	}
	for _, p := range b.Peers {
		if p.Repetitions != 16 || b.Initiations != 2 || b.ups() != 2 {
			t.Errorf("%+v", p)
		}
	}
}

// Output of FRR 8.4.
const showBMP = `
    1 connected clients:
 remote          uptime     MonSent   MirrSent   MirrLost   ByteSent   ByteQ   ByteQKernel   
 ----------------------------------------------------------------------------------------------
 10.98.0.1:1790   00:00:05   3004      0          0          %d     0       0
`

func TestSentTo(t *testing.T) {
	if n, err := sentTo(fmt.Sprintf(showBMP, 321439), 1790); n != 321439 || err != nil {
		t.Error(n, err)
	}
	if _, err := sentTo(fmt.Sprintf(showBMP, 1), 1791); err == nil {
		t.Error("a line about another session counts")
	}
}
