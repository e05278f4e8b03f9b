// SPDX-License-Identifier: Apache-2.0

package move

import "testing"

const (
	backendA Backend = 1
	backendB Backend = 2
)

// TestMove runs a move without faults, message by message.
func TestMove(t *testing.T) {
	f, s, d := Flow{Owner: backendA}, Source{}, Destination{}
	do, err := s.Start(backendB)
	if err != nil {
		t.Fatal(err)
	}
	if !f.In(backendA) {
		t.Error("packets do not pass before the move")
	}
	held := f.Receive(backendA, do.Send[0], false)[0]
	if !held.OK || f.In(backendA) {
		t.Fatalf("%v; packets pass: %v", held, f.In(backendA))
	}
	if do = s.Receive(held); do.Actions[0] != Dump {
		t.Fatalf("then %v", do)
	}
	do = d.Receive(s.Dumped().Send[0])
	if do.Actions[0] != Restore {
		t.Fatalf("then %v", do)
	}
	flipped := f.Receive(backendB, d.Restored().Send[0], false)[0]
	if !flipped.OK || !f.In(backendB) || f.In(backendA) || f.Out(backendA, false) {
		t.Fatalf("%v, flow %+v", flipped, f)
	}
	do = d.Receive(flipped)
	if do.Actions[0] != Deliver || do.Send[0].Kind != Done {
		t.Fatalf("then %v", do)
	}
	do = s.Receive(do.Send[0])
	if do.Send[0].Kind != Reclaim {
		t.Fatalf("then %v", do)
	}
	gone := f.Receive(backendA, do.Send[0], false)[0]
	if do = s.Receive(gone); gone.OK || do.Actions[0] != Close || s.Phase != Closed {
		t.Fatalf("%v, then %v", gone, do)
	}
}

// TestRefusals checks the rejection of messages from other backends than the owner. They change nothing.
func TestRefusals(t *testing.T) {
	held := Flow{Owner: backendA, Epoch: 4, Buffering: true, To: backendB}
	for name, c := range map[string]struct {
		flow Flow
		from Backend
		m    Message
	}{
		"hold by another":                {Flow{Owner: backendA}, backendB, Message{Kind: Buffer, Epoch: 1, Backend: 3}},
		"hold in an epoch gone by":       {Flow{Owner: backendA, Epoch: 4}, backendA, Message{Kind: Buffer, Epoch: 4, Backend: backendB}},
		"hold for oneself":               {Flow{Owner: backendA}, backendA, Message{Kind: Buffer, Epoch: 1, Backend: backendA}},
		"hold for nobody":                {Flow{Owner: backendA}, backendA, Message{Kind: Buffer, Epoch: 1}},
		"hold for a third":               {held, backendA, Message{Kind: Buffer, Epoch: 5, Backend: 3}},
		"flip by a third":                {held, 3, Message{Kind: Flip, Epoch: 5}},
		"flip in an epoch gone by":       {held, backendB, Message{Kind: Flip, Epoch: 3}},
		"flip of what is not moved":      {Flow{Owner: backendA}, backendB, Message{Kind: Flip, Epoch: 1}},
		"reclaim by a third":             {held, 3, Message{Kind: Reclaim, Epoch: 5}},
		"reclaim of what was never held": {Flow{Owner: backendA}, backendA, Message{Kind: Reclaim, Epoch: 1}},
		"reclaim of a move forgotten":    {Flow{Owner: backendA}, backendA, Message{Kind: Reclaim, Epoch: 3}},
		"reclaim of an earlier move":     {Flow{Owner: backendB, Epoch: 3, Predecessor: backendA}, backendA, Message{Kind: Reclaim, Epoch: 1}},
	} {
		f := c.flow
		a := f.Receive(c.from, c.m, true)
		if a[0].OK || a[1].Kind != 0 || f != c.flow {
			t.Errorf("%s: %v, flow %+v", name, a, f)
		}
	}
}

// TestReclaimAfterFlip reclaims a session after a Flip. It fails once the destination has sent a packet. Before, it
// succeeds if the destination is gone.
func TestReclaimAfterFlip(t *testing.T) {
	for _, spoke := range []bool{false, true} {
		f := Flow{Owner: backendA, Buffering: true, To: backendB}
		f.Receive(backendB, Message{Kind: Flip, Epoch: 1}, false)
		if spoke {
			f.Out(backendB, false)
		}
		a := f.Receive(backendA, Message{Kind: Reclaim, Epoch: 1}, true)
		if a[0].OK == spoke || f.In(backendA) == spoke {
			t.Errorf("the destination spoke: %v; %v, flow %+v", spoke, a, f)
		}
	}
}

// TestHoldOfLaterEpoch sends a Buffer to a load balancer that has forgotten moves. It adopts the owner's epoch.
func TestHoldOfLaterEpoch(t *testing.T) {
	f := Flow{Owner: backendA}
	if a := f.Receive(backendA, Message{Kind: Buffer, Epoch: 3, Backend: backendB}, false)[0]; !a.OK || f != (Flow{Owner: backendA, Epoch: 2, Buffering: true, To: backendB}) {
		t.Fatalf("%v, flow %+v", a, f)
	}
	if a := f.Receive(backendB, Message{Kind: Flip, Epoch: 1}, false)[0]; a.OK {
		t.Errorf("a flip of a move forgotten: %v", a)
	}
	if a := f.Receive(backendB, Message{Kind: Flip, Epoch: 3}, false)[0]; !a.OK || f.Owner != backendB || f.Epoch != 3 {
		t.Errorf("%v, flow %+v", a, f)
	}
}

// TestUnknownToLBEnd reclaims a move unknown to the load balancer. A source without a sent State keeps the session.
// With one it closes its copy, because the destination may have another.
func TestUnknownToLBEnd(t *testing.T) {
	no := Message{Kind: Reclaimed, Move: 3}
	for name, c := range map[string]struct {
		source Source
		want   Action
		phase  SourcePhase
	}{
		"refused":         {Source{Phase: Reclaiming, Epoch: 3}, Thaw, Owns},
		"sent":            {Source{Phase: Reclaiming, Epoch: 3, Sent: true}, Close, Closed},
		"resumed, alive":  {Resumed(3, 0, false), Thaw, Owns},
		"resumed, frozen": {Resumed(3, 0, true), Close, Closed},
	} {
		if do := c.source.Receive(no); do.Actions[0] != c.want || c.source.Phase != c.phase {
			t.Errorf("%s: %v, %+v", name, do.Actions, c.source)
		}
	}
	s := Source{Epoch: 2}
	if _, err := s.Start(backendB); err != nil {
		t.Fatal(err)
	}
	s.Receive(Message{Kind: Buffered, Epoch: 3})
	s.Receive(no)
	if s.Phase != Owns || s.Epoch != 4 {
		t.Errorf("%+v: want it to own the session, in an epoch of which nothing is on its way", s)
	}
}

// TestAhead sends the session before the load balancer's answer, with the nonce of its record.
func TestAhead(t *testing.T) {
	f, s, d := Flow{Owner: backendA, Nonce: 7}, Source{Nonce: 7}, Destination{}
	hold, err := s.Start(backendB)
	if err != nil {
		t.Fatal(err)
	}
	if do := s.Ahead(); do.Actions[0] != Dump || s.Phase != Moving {
		t.Fatalf("%v, %+v", do, s)
	}
	state := s.Dumped().Send[0]
	if do := s.Ahead(); do != (Do{}) {
		t.Errorf("a second time: %v", do)
	}
	held := f.Receive(backendA, hold.Send[0], false)[0]
	if do := s.Receive(held); !held.OK || do != (Do{}) || s.Phase != Moving {
		t.Fatalf("%v, %v, %+v", held, do, s)
	}
	d.Receive(state)
	flipped := f.Receive(backendB, d.Restored().Send[0], false)[0]
	if do := d.Receive(flipped); do.Actions[0] != Deliver || d.Nonce != 7 {
		t.Errorf("%v, %+v", do, d)
	}
	if f != (Flow{Owner: backendB, Epoch: 1, Predecessor: backendA, Nonce: 7}) {
		t.Errorf("%+v", f)
	}
}

// TestNotAhead checks that a source without a nonce waits.
func TestNotAhead(t *testing.T) {
	s := Source{}
	if _, err := s.Start(backendB); err != nil {
		t.Fatal(err)
	}
	if do := s.Ahead(); do != (Do{}) || s.Phase != Holding {
		t.Errorf("%v, %+v", do, s)
	}
	s = Source{Nonce: 7}
	if _, err := s.Start(backendB); err != nil {
		t.Fatal(err)
	}
	s.Retry() // sends a second Buffer
	if do := s.Ahead(); do != (Do{}) || s.Phase != Holding {
		t.Errorf("%v, %+v", do, s)
	}
}

// TestNeverHeard reclaims a sent session from a load balancer without its Buffer. Only the record with the source's
// nonce may return it.
func TestNeverHeard(t *testing.T) {
	for name, c := range map[string]struct {
		flow Flow
		back bool
		want Flow
	}{
		"never heard":       {Flow{Owner: backendA, Epoch: 4, Nonce: 7}, true, Flow{Owner: backendA, Epoch: 6, Nonce: 7}},
		"another record":    {Flow{Owner: backendA, Epoch: 0, Nonce: 9}, false, Flow{Owner: backendA, Epoch: 0, Nonce: 9}},
		"without a birth":   {Flow{Owner: backendA, Epoch: 4}, false, Flow{Owner: backendA, Epoch: 4}},
		"moved":             {Flow{Owner: backendB, Epoch: 5, Nonce: 7}, false, Flow{Owner: backendB, Epoch: 5, Nonce: 7}},
		"refused to flip":   {Flow{Owner: backendA, Epoch: 5, Nonce: 7}, true, Flow{Owner: backendA, Epoch: 6, Nonce: 7}},
		"of an earlier one": {Flow{Owner: backendA, Epoch: 2, To: backendB, Buffering: true, Nonce: 7}, true, Flow{Owner: backendA, Epoch: 6, Nonce: 7}},
	} {
		s := Source{Phase: Moving, Epoch: 5, Sent: true, Nonce: 7}
		f := c.flow
		a := f.Receive(backendA, s.Retry().Send[0], false)[0]
		if a.OK != c.back || f != c.want {
			t.Errorf("%s: %v, %+v", name, a, f)
		}
		do := s.Receive(a)
		if want := map[bool]Action{true: Thaw, false: Close}[c.back]; do.Actions[0] != want {
			t.Errorf("%s: %v, want %v", name, do, want)
		}
	}
}

// TestRefusedAhead rejects the only Buffer of a source. The source keeps the session, even after sending State.
func TestRefusedAhead(t *testing.T) {
	s := Source{Epoch: 4, Nonce: 7}
	if _, err := s.Start(backendB); err != nil {
		t.Fatal(err)
	}
	s.Ahead()
	s.Dumped()
	do := s.Receive(Message{Kind: Buffered, Epoch: 5})
	if do.Send[0].Kind != Reclaim {
		t.Fatal(do)
	}
	if do = s.Receive(Message{Kind: Reclaimed, Move: 5}); do.Actions[0] != Thaw || s.Phase != Owns || s.Epoch != 6 || s.Nonce != 0 {
		t.Errorf("%v, %+v", do, s)
	}
	s = Source{Phase: Reclaiming, Epoch: 5, Nonce: 7, Sent: true} // it has already sent Reclaim, because the destination was gone
	if do = s.Receive(Message{Kind: Buffered, Epoch: 5}); do != (Do{}) || s.Sent {
		t.Errorf("%v, %+v", do, s)
	}
}
