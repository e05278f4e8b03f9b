// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"regexp"
	"strconv"

	"github.com/weir-project/weir/internal/inventory"
)

// Suggester is implemented by features that propose configuration for a host. weir init collects the suggestions.
type Suggester interface {
	// Suggest returns suggestions for a host, in a fixed order. Each must be valid beside all others.
	Suggest(h inventory.Host) []Suggestion
}

// Suggestion is a part of weir.yaml.
type Suggestion struct {
	// Service is the name of a program's service (inventory.Program.Service): Text is then in this service, beside its
	// name, listens and namespace. Empty: Text is at the top of the file.
	Service string
	Text    string   // YAML, one or several keys with their values, without indentation
	Reason  []string // comment lines above Text: the reason and the next step
	// Active puts Text in force. It must change no traffic by itself, or only the traffic of the suggestion's purpose.
	// Otherwise Text is commented out.
	Active bool
}

// plainScalar matches text that YAML reads as a string without quotes, whatever surrounds it.
var plainScalar = regexp.MustCompile(`^[A-Za-z/][A-Za-z0-9/._@-]*$`)

// Scalar returns text as a YAML scalar, with quotes if it needs them.
func Scalar(text string) string {
	switch text {
	case "true", "false", "yes", "no", "on", "off", "null", "y", "n":
		return strconv.Quote(text)
	}
	if plainScalar.MatchString(text) {
		return text
	}
	return strconv.Quote(text)
}
