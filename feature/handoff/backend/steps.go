// SPDX-License-Identifier: Apache-2.0

package backend

// Steps are those of a move after which an agent may die, in the order in which they come: of the backend that a session
// leaves, and of the one where it arrives.
var Steps = struct{ Leaving, Arriving []string }{
	Leaving:  []string{stepGiven, stepKept, stepBuffer, stepShut, stepDumped, stepSent, stepBuffered, stepDone, stepReclaimed, stepDropped},
	Arriving: []string{stepState, stepQuiet, stepBuilt, stepKeptHere, stepFlip, stepFlipped, stepStarted, stepToldDone, stepHandedIn},
}

const (
	stepGiven     = "leaving: given"     // by the member
	stepKept      = "leaving: kept"      // the keeper knows that a move begins
	stepBuffer    = "leaving: hold"      // was said to the load balancer
	stepShut      = "leaving: shut"      // is the quarantine
	stepDumped    = "leaving: dumped"    // is the socket
	stepSent      = "leaving: sent"      // is the state
	stepBuffered  = "leaving: held"      // is the load balancer's answer; where it has to be waited for, before the quarantine is shut
	stepDone      = "leaving: done"      // says the other backend
	stepReclaimed = "leaving: reclaimed" // has the load balancer answered
	stepDropped   = "leaving: dropped"   // is what was left

	stepState    = "arriving: state"     // has come
	stepQuiet    = "arriving: quiet"     // is the quarantine
	stepBuilt    = "arriving: built"     // is the socket
	stepKeptHere = "arriving: kept"      // by the keeper
	stepFlip     = "arriving: flip"      // was said to the load balancer
	stepFlipped  = "arriving: flipped"   // is the load balancer's answer
	stepStarted  = "arriving: started"   // is the session
	stepToldDone = "arriving: told"      // was the other backend
	stepHandedIn = "arriving: handed in" // to a member
)
