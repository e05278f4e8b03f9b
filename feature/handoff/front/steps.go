// SPDX-License-Identifier: Apache-2.0

package front

// Steps are those of a move after which a front end's agent may die, in the order in which they come.
var Steps = []string{stepHeld, stepParked, stepToldHeld, stepFlipped, stepToldFlipped, stepLetGo, stepToldGone}

const (
	stepHeld        = "front end: held"         // in the flow's record
	stepParked      = "front end: parked"       // are its packets
	stepToldHeld    = "front end: told held"    // was the source
	stepFlipped     = "front end: flipped"      // in the flow's record
	stepToldFlipped = "front end: told flipped" // was the destination
	stepLetGo       = "front end: let go"       // are the packets
	stepToldGone    = "front end: told gone"    // was the source: another has it for good
)
