// SPDX-License-Identifier: Apache-2.0

package kernel

// Version is this weir's, as the meta of each instance keeps it. The program sets it once, before it publishes anything.
var Version = "devel"
