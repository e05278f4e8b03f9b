// SPDX-License-Identifier: Apache-2.0

package backend

// Steps are the steps of a move at which tests kill an agent, in order: at the source, and at the destination.
var Steps = struct{ Leaving, Arriving []string }{
	Leaving:  []string{stepGiven, stepKept, stepBuffer, stepShut, stepDumped, stepSent, stepBuffered, stepDone, stepReclaimed, stepDropped},
	Arriving: []string{stepState, stepQuiet, stepBuilt, stepKeptHere, stepFlip, stepFlipped, stepStarted, stepToldDone, stepHandedIn},
}

const (
	stepGiven     = "leaving: given"     // the member has transferred the session
	stepKept      = "leaving: kept"      // the keeper knows of the move
	stepBuffer    = "leaving: hold"      // Buffer is sent to the load balancer
	stepShut      = "leaving: shut"      // the quarantine is shut
	stepDumped    = "leaving: dumped"    // the socket is dumped
	stepSent      = "leaving: sent"      // the state is sent
	stepBuffered  = "leaving: held"      // the load balancer has answered Buffer; before stepShut, if the source waits for it
	stepDone      = "leaving: done"      // the destination has reported Done
	stepReclaimed = "leaving: reclaimed" // the load balancer has answered Reclaim
	stepDropped   = "leaving: dropped"   // the local copy is dropped

	stepState    = "arriving: state"     // the state has arrived
	stepQuiet    = "arriving: quiet"     // the quarantine is set to quiet
	stepBuilt    = "arriving: built"     // the socket is built
	stepKeptHere = "arriving: kept"      // the keeper has the session
	stepFlip     = "arriving: flip"      // Flip is sent to the load balancer
	stepFlipped  = "arriving: flipped"   // the load balancer has answered Flip
	stepStarted  = "arriving: started"   // the session is started
	stepToldDone = "arriving: told"      // Done is sent to the source
	stepHandedIn = "arriving: handed in" // a member has the session
)
